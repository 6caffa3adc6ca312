"""The policy of a warm start is also kept where the configuration says, once."""

import pytest

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.runtime.training.warm_starting import _keep_output


@pytest.mark.parametrize("written", ["new", "new/", "far/new", "empty", "link", "other"])
def test_the_output_gets_the_policy_where_it_has_none(tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path)
    for name in ("warm", "empty", "other", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "warm" / "config.json").write_text("warm")
    (tmp_path / "other" / "config.json").write_text("another")
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    config = from_dict({"warm_start": {"stages": [{"steps": 1}], "output": written}})
    for _ in range(2):
        _keep_output(config, str(tmp_path / "warm"))
    text = (tmp_path / written / "config.json").read_text()
    assert text == ("another" if written == "other" else "warm")
    assert not list(tmp_path.rglob("*.unfinished")) and (tmp_path / "link").is_symlink()
