"""What is another run than the one that was begun."""

import json
import os

import pytest

from seeupo_jax.configuration.loading import from_dict, to_dict
from seeupo_jax.policy_io.resume_check import adapters_note, check_same_run, sampling_hash
from seeupo_jax.supervised.sft_checkpoints import check_same_sft


def same_sft(config, saved, adapters=None):
    noted = {} if adapters is None else {"adapters": adapters}
    check_same_sft(config, "x", {"config": saved, "sft": {"data": "x"}, **noted})


@pytest.mark.parametrize("check", [check_same_run, same_sft])
def test_a_run_that_is_resumed_with_another_models_path_is_warned(check, caplog):
    saved = to_dict(from_dict({"model": {"path": "first/policy"}}))
    for same in ("first/policy", "first/policy/", os.path.abspath("first/policy")):
        check(from_dict({"model": {"path": same}}), saved)
    assert not caplog.records
    check(from_dict({"model": {"path": "second"}}), saved)
    (record,) = caplog.records
    assert "got second; this workdir's checkpoint began with first/policy" in record.getMessage()


NEW = r"\. Choose a new workdir for another run\.$"
FROZEN = ({"lora": {"rank": 8}}, {"optimizer": {"groups": [{"pattern": "*", "frozen": True}]}})


@pytest.mark.parametrize("check", [check_same_run, same_sft])
@pytest.mark.parametrize("partly", FROZEN)
def test_parameters_that_were_trained_beside_anothers_are_refused(check, partly):
    first, second = (from_dict(partly | {"model": {"path": path}}) for path in ("one", "two"))
    check(first, to_dict(first))
    with pytest.raises(ValueError, match="^config.model.path: got two; allowed .*: one, .*" + NEW):
        check(second, to_dict(first))


@pytest.mark.parametrize("check", [check_same_run, same_sft])
def test_adapters_of_another_scale_are_refused(check):
    model = {"model": {"path": "one"}}
    first, second = (from_dict(model | {"lora": {"rank": 8, "alpha": a}}) for a in (16, 64))
    with pytest.raises(ValueError, match="^config.lora.alpha: got 64.*; allowed .*: 16.0" + NEW):
        check(second, to_dict(first))


def adapters_in(folder, alpha):
    """A folder of adapters of rank 4, as far as a configuration reads it."""
    folder.mkdir()
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": alpha, "target_modules": ["v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return from_dict({"model": {"path": "one"}, "lora": {"path": str(folder)}})


@pytest.mark.parametrize("check", [check_same_run, same_sft])
def test_adapters_that_a_folder_has_are_compared_with_what_they_were(check, tmp_path, caplog):
    begun = adapters_in(tmp_path / "begun", 64)
    saved, note = to_dict(begun), adapters_note(begun)
    scale = {"alpha": 64.0, "rslora": False}
    assert note == {"rank": 4, **scale, "targets": ["v_proj"], "layers": None}
    check(begun, saved, note)

    def new(**lora):
        return from_dict(
            {"model": {"path": "one"}, "lora": {"rank": 4, "targets": ["v_proj"], **lora}}
        )

    for other, sentence in (
        (new(), "config.lora.alpha: got 32.0; allowed .*: 64.0"),
        (new(alpha=64, rank=8), "config.lora.rank: got 8; allowed .*: 4"),
        (new(alpha=64, rslora=True), "config.lora.rslora: got True; allowed .*: False"),
        (new(alpha=64, per_turn=2), "config.lora.per_turn: got 2; allowed .*: 0"),
        (new(alpha=64, targets=["q_proj"]), "config.lora.targets: got .*q_proj.*: .*v_proj.*"),
        (adapters_in(tmp_path / "weak", 8), "config.lora.path: got .*weak of alpha 8.0; .*: 64.0"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}{NEW}"):
            check(other, saved, note)
        check(other, saved)  # of an earlier version, which did not say what the folder had
    caplog.clear()
    check(begun, saved, note)
    assert not caplog.records
    check(new(alpha=64), saved, note)
    (record,) = caplog.records
    assert "config.lora.path: got None; this workdir's checkpoint began" in record.getMessage()


@pytest.mark.parametrize(
    "compute_options", [{"remat": "full"}, {"attention": "xla"}, {"scan_layers": True}]
)
def test_stored_rollouts_are_of_a_model_with_any_compute_options(compute_options):
    made = sampling_hash(from_dict({}))
    assert made.startswith("4ebebd11f2876217")  # stored ones stay usable: as in November 2026
    assert sampling_hash(from_dict({"model": compute_options})) == made
    assert sampling_hash(from_dict({"model": {"dtype": "bfloat16"}})) != made


def test_stored_rollouts_are_of_the_rule_that_dynamic_sampling_keeps_groups_by():
    for rounds, different in ((0, 1), (2, 3)):
        fields = {"algorithm": {"dynamic_sampling": rounds}}
        made = {
            sampling_hash(from_dict(fields | {"recipe": r})) for r in ("seeupo", "gdpo", "gigpo")
        }
        assert len(made) == different


@pytest.mark.parametrize("name", ["workers", "timeout_s", "retries", "retry_wait_s"])
def test_a_run_may_resume_that_calls_its_environments_otherwise(name):
    check_same_run(from_dict({"env": {name: 3}}), to_dict(from_dict({})))
    with pytest.raises(ValueError, match="^config.env.max_reward: got 2"):
        check_same_run(from_dict({"env": {name: 3, "max_reward": 2}}), to_dict(from_dict({})))


def test_a_run_whose_figures_are_of_one_split_resumes_with_no_other():
    """Metrics named `eval/` do not name it: of two splits, one would have the other's name."""
    saved = to_dict(from_dict({"evaluation": {"split": "dev"}}))
    free = {"k": 8, "tasks": 9, "every": 1, "extra_splits": ["train"], "select_on": "train"}
    check_same_run(from_dict({"evaluation": {"split": "dev", **free}}), saved)
    sentence = "^config.evaluation.split: got 'train'; allowed for this workdir, .*: 'dev'"
    with pytest.raises(ValueError, match=sentence):
        check_same_run(from_dict({"evaluation": {"split": "train"}}), saved)
