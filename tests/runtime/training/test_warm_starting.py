"""The policy of a warm start is also kept where the configuration says, once."""

import json

import pytest

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.runtime.resuming import warm_start_note
from seeupo_jax.runtime.training.warm_starting import _keep_output, start_policy


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


def test_a_run_starts_from_its_own_warm_start_only(tmp_path):
    config, other = (from_dict({"seed": n, "warm_start": {"stages": [{}]}}) for n in (0, 1))
    folder = tmp_path / "warm_start"
    folder.mkdir()
    (folder / "warm_start.json").write_text(json.dumps(warm_start_note(config)))
    assert start_policy(config, tmp_path, None, None) == str(folder)
    with pytest.raises(ValueError, match="^config.seed: got 1; allowed for this workdir"):
        start_policy(other, tmp_path, None, None)
