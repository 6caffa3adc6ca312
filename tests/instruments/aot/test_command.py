import contextlib
import dataclasses
import io
import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest
import tpu_cases
from jax.experimental.compilation_cache import compilation_cache
from places import SUPPORT
from tpu_cases import needs_libtpu

from seeupo_jax.aot import _command, main
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.instruments.aot import tune
from seeupo_jax.instruments.aot.expected_figures import expected_figures
from seeupo_jax.instruments.aot.table import table
from seeupo_jax.learner.program_warming import sweep_programs
from seeupo_jax.planning import chips, flops
from seeupo_jax.planning.aot import measure, search
from seeupo_jax.planning.aot.report import Report
from seeupo_jax.planning.collectives import collectives
from seeupo_jax.planning.slices.slice_programs import choose_programs, list_programs, prepare
from seeupo_jax.policy.files.weights import load_architecture

SMALL = str(SUPPORT / "aot_config.py")
COMPILED = "sweep/turn,sweep/score,rollout/reshard,rollout/prefill,rollout/decode"
MIB = 2**20


def run(*flags, config=SMALL, topology="v5e:2x2"):
    """The command's exit status."""
    try:
        return main(["aot", f"--config={config}", f"--topology={topology}", *flags])
    except SystemExit as stop:
        return stop.code


def sentence(capsys):
    """What the command says where it refuses: one line."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """All that the command writes of the small configuration, and all that it prints."""
    file = tmp_path_factory.mktemp("aot") / "report.json"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run(f"--programs={COMPILED}", f"--json={file}") == 0
    return json.loads(file.read_text()), printed.getvalue()


@pytest.fixture(scope="module")
def report(written):
    return written[0]


@pytest.fixture(scope="module")
def setup():
    return prepare(load_config(SMALL), chips.parse_topology("v5e:2x2"))


@needs_libtpu
def test_the_parts_of_memory_are_these_to_the_byte(report):
    matrices = 2 * (384 * 3 * 256 + 256 * 384 + 3 * 384 * 384) + 1_024 * 384
    across_fsdp, replicated = (2 * 2 + 1) * 384, 2 * 2 * 128  # norms of width; of queries and keys
    parameters = 4 * (matrices // 4 + across_fsdp // 2 + replicated)
    assert report["parameters"] == matrices + across_fsdp + replicated
    # Matrices of bfloat16 cut over the two devices of the sampler's tensor axis; norms are float32.
    copied = 2 * matrices // 2 + 4 * (across_fsdp + replicated)
    assert report["parts"] == {
        "parameters": parameters,
        "optimizer": 2 * parameters + 4,
        "reference": parameters,
        # Four conversations of 512 tokens; in two layers a key and a value of one head of 128.
        "KV cache": 4 * 512 * 2 * 2 * 128 * 2,
        "sampler's policy": copied,
    }


@needs_libtpu
def test_the_compilers_effort_is_told_where_it_is_not_the_usual(setup):
    usual = Report(setup, SMALL).head().splitlines()
    jax.config.update("jax_optimization_level", "O1")
    try:
        lower = Report(setup, SMALL).head().splitlines()
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")
    assert lower == [*usual, "compiled at optimization level O1"]


@needs_libtpu
def test_a_program_is_told_with_what_it_works_on_and_what_lies_beside_it(report, setup):
    parts, turn = report["parts"], report["programs"]["sweep/turn"]
    assert turn["name"] == "sweep/turn 512"
    assert {name: turn["inside"][name] for name in ("parameters", "optimizer")} == {
        name: parts[name] for name in ("parameters", "optimizer")
    }
    assert turn["beside"] == {"reference": parts["reference"]}
    (step,) = (
        p for p in sweep_programs(setup.learner, setup.trajectories) if p.name == "sweep/turn 512"
    )
    leaves = jax.tree.leaves(step.arguments(setup.state, setup.reference))
    structs = (leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct))
    batch = sum(x.size * x.dtype.itemsize for x in structs if x.sharding is None)  # from the host
    # A microbatch's two rows take the room of eight on a TPU.
    assert batch < turn["inside"]["batch, padding"] < 4 * batch
    assert turn["inside"]["gradients"] == parts["parameters"]
    together = sum(turn["inside"].values()) + sum(turn["beside"].values())
    assert turn["peak"] == together < 16 * 2**30
    decode = report["programs"]["rollout/decode"]
    assert decode["inside"]["KV cache"] == parts["KV cache"]
    assert decode["beside"].keys() == {"parameters", "optimizer", "reference"}


@needs_libtpu
def test_flops_and_traffic_are_of_all_microbatches_and_of_all_decoded_tokens(report, setup):
    turn, decode = (report["programs"][kind] for kind in ("sweep/turn", "rollout/decode"))
    assert turn["six_nd_flops"] == 6 * report["parameters"] * 8 * 512
    wanted = flops.turn_step_flops(setup.arch, 8, 512, 64, refresh=256, computed=True)
    assert turn["executed_flops"] == wanted > turn["needed_flops"]
    (step,) = choose_programs(list_programs(setup), ["sweep/turn"])
    # AdamW reads parameters, gradients and two moments, and writes all but the gradients.
    assert step.update_bytes == 7 * report["parts"]["parameters"] < step.hbm_bytes
    # Each of four microbatches gathers each layer's matrices three times: forward, again, backward.
    gathered = [t for t in turn["traffic"] if (t["kind"], t["axes"]) == ("all-gather", ["fsdp"])]
    assert gathered[0]["count"] >= 4 * 3 * 2 * 7
    reduced = [t for t in decode["traffic"] if (t["kind"], t["axes"]) == ("all-reduce", ["tensor"])]
    assert reduced[0]["count"] >= 8 * 2 * 2  # eight tokens, two layers, two sums each
    moved = report["programs"]["rollout/reshard"]["traffic"]
    assert {t["kind"] for t in moved} >= {"all-gather"} and moved[0]["bytes"] > 0.4 * MIB


@needs_libtpu
@pytest.mark.parametrize("sampler", ["None", "{'data': 4, 'tensor': 2}"])
def test_no_decode_step_meets_another_slice(sampler):
    """Compiled for two slices of four chips: what goes between them, the hosts send."""
    fields = ["mesh={'data': 1, 'fsdp': 4, 'tensor': 2}", f"rollout.mesh={sampler}"]
    found = prepare(load_config(SMALL, fields), chips.parse_topology("v6e:2x2*2"))
    where = [device.slice_index for device in found.sampler_mesh.devices.flat]
    assert where == [0] * 4 + [1] * 4
    for program in choose_programs(list_programs(found), ["rollout/reshard", "rollout/decode"]):
        text = program.lower().compile().as_text()
        crosses = program.kind == "rollout/reshard"  # once a rollout
        axes = {axis for each in collectives(text, program.mesh.shape) for axis in each.axes}
        assert ("slices" in axes) == ("xla_megascale_runtime" in text) == crosses


@needs_libtpu
def test_the_estimate_of_an_iteration_counts_every_program(report):
    made = report["iteration"]
    assert made["sampled"] == 64 and made["context"] == 8 * (512 - 4 * 64)
    assert {part["name"]: part["times"] for part in made["parts"]} == {
        "rollout/reshard": 1,
        "rollout/prefill": 8 * 256 / (16 * 128),
        "rollout/decode": 8 * 256 / (8 * 8),
        "sweep/score": 2,
        "sweep/turn": 4,
    }
    assert all(0 < part["step_s"] <= part["serial_s"] for part in made["parts"])


@needs_libtpu
def test_times_are_told_at_best_and_at_published_efficiency(written):
    report, printed = written
    assert report["efficiency"] == {"compute": 0.6, "memory": 0.6}
    for each in report["programs"].values():
        line = each["roofline"]
        slower = max(line["compute_s"], line["memory_s"]) / 0.6
        assert line["published_s"] == pytest.approx(max(slower, line["serial_s"]))
    made = report["iteration"]
    for key in ("step_s", "serial_s", "published_s"):
        assert made[key] == pytest.approx(sum(part[key] for part in made["parts"]))
    pattern = (
        r"one iteration, estimated: (\S+) s on the devices at published efficiency;"
        r" at best (\S+) to (\S+) s \(full overlap to no overlap\)"
    )
    published, *best = map(float, re.search(pattern, printed).groups())
    assert published == pytest.approx(made["published_s"], rel=0.01)
    assert best[0] <= best[1] <= published
    assert "published efficiency: 60% of the peak FLOP/s, 60% of the memory's bandwidth" in printed
    assert f"left out: {'; '.join(report['left_out'])}\n" in printed
    for what in ("hosts", "environments", "waves", "resharding", "stragglers"):
        assert what in " ".join(report["left_out"])
    # Of the model's FLOPs, over those of four chips of 197 TFLOP/s.
    row = re.search(r"MFU, published +(\d+)%", printed)
    turn = report["programs"]["sweep/turn"]
    mfu = turn["needed_flops"] / (4 * 197e12 * turn["roofline"]["published_s"])
    assert int(row[1]) == round(100 * mfu) <= 60


@needs_libtpu
def test_reports_become_rows_of_a_table(report):
    head, _, row, _, _, command, _ = table([report]).splitlines()
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert cells["slice"] == "v5e:2x2" and cells["fits"] == "yes" and cells["of GiB"] == "15.75"
    assert command.startswith(f"python -m seeupo_jax.aot --config={SMALL} --topology=v5e:2x2")
    other = report | {"command": f"{report['command']} --config.model.path=models/Other"}
    assert f"{cells['| config']}, Other |" in table([other])


@needs_libtpu
def test_what_does_not_fit_is_told_and_exits_1(capsys):
    wide = ("--config.model.head_dim=512", "--config.model.dtype=float32")  # eight times the bytes
    flags = (*wide, "--config.rollout.tasks=10000", "--programs=rollout/decode")
    assert run(*flags) == 1
    output = capsys.readouterr().out
    assert re.search(r"rollout: fits: no: rollout/decode \d+x32: .*exceed.*HBM.*\.\n", output)


@needs_libtpu
@pytest.mark.parametrize(
    "f",
    [
        pytest.param(lambda x, v: jax.nn.softmax(x @ x.T) @ x, id="score matrix"),
        pytest.param(lambda x, v: jax.nn.softmax(x @ v), id="logits"),
    ],
)
def test_a_score_matrix_and_whole_logits_are_found(f, setup):
    """65,536 tokens of 1,024 words are 256 MiB of logits; what a chunk may hold is 64."""
    (turn,) = choose_programs(list_programs(setup), ["sweep/turn"])
    long = dataclasses.replace(turn, row_length=65_536)
    where = jax.sharding.SingleDeviceSharding(setup.mesh.devices.flat[0])
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)
        for shape in ((65_536, 384), (384, 1_024))
    ]
    text = jax.jit(f).lower(*shapes).compile().as_text()
    assert measure.forbidden(text, setup, long)
    assert not measure.forbidden(text, setup, dataclasses.replace(turn, row_length=None))


@needs_libtpu
def test_what_this_machine_could_not_load_again_is_not_kept(tmp_path):
    """A slice's programs cannot be loaded where its chips are not, not even from a cache in use."""
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    jax.jit(lambda x: 3 * x + 1).lower(1.0).compile()
    kept = sorted((tmp_path / "xla").iterdir())
    assert kept
    for _ in range(2):
        assert run("--programs=rollout/reshard") == 0
    assert sorted((tmp_path / "xla").iterdir()) == kept


@needs_libtpu
def test_the_search_finds_the_last_size_that_fits(setup, monkeypatch):
    for most, wanted in ((0, None), (512, 512), (1500, 1024), (2048, 2048), (9999, 2048)):
        tried = []

        def fit(_, tokens, most=most, tried=tried):
            tried.append(tokens)
            return tokens <= most

        monkeypatch.setattr(search, "_tokens_fit", fit)
        assert search.search(setup, {})["batching.microbatch_tokens"] == wanted
        assert len(tried) <= 2  # of 512, 1024 and 2048


@needs_libtpu
@pytest.mark.parametrize(
    "tokens, wanted", [(512, {"none"}), (2**20, {"dots", "attention", "full"})]
)
def test_recomputation_is_chosen_by_the_memory_of_the_chip(tokens, wanted):
    choices = ["model.remat=auto", f"batching.buckets=({tokens},)", "rollout.concurrency=2"]
    found = prepare(load_config(SMALL, choices), chips.parse_topology("v5e:2x2"))
    assert found.arch.remat in wanted
    assert found.given.model.remat == "auto"  # a search for more rows chooses anew


@needs_libtpu
@pytest.mark.parametrize("offload", [False, True])
def test_the_average_of_the_parameters_is_a_part_and_its_program_compiles(setup, offload):
    choices = ["optimizer.ema=0.9", f"offload.optimizer={offload}"]
    found = prepare(load_config(SMALL, choices), chips.parse_topology("v5e:2x2"))
    parameters = setup.parts["parameters"]
    assert found.parts["parameters"] == parameters and "average" not in setup.parts
    assert found.parts.get("average", 0) == (0 if offload else parameters)
    (program,) = (p for p in list_programs(found) if p.name == "sweep/average")
    memory = program.lower().compile().memory_analysis()
    # Padding to tiles comes to the bytes of the shapes.
    for on_host in (memory.host_argument_size_in_bytes, memory.host_output_size_in_bytes):
        assert on_host >= parameters if offload else on_host == 0
    assert memory.argument_size_in_bytes // parameters == (1 if offload else 2)


@needs_libtpu
def test_the_program_that_moves_the_reference_policy_reads_two_trees(setup):
    choices = ["algorithm.kl_coef=0.1", "algorithm.reference.every=2"]
    found = prepare(load_config(SMALL, choices), chips.parse_topology("v5e:2x2"))
    (program,) = (p for p in list_programs(found) if p.name == "sweep/move reference")
    assert program.uses == ("parameters", "reference")
    assert program.lower().compile().memory_analysis().output_size_in_bytes > 0


@needs_libtpu
def test_the_cache_takes_what_the_programs_leave(setup):
    usable = chips.usable_hbm(setup.mesh.devices.flat[0])
    plan = setup.engine.plan

    def left(room):
        inside = {"KV cache": plan.bytes, "temporaries": usable - room - plan.bytes}
        figures = {
            "rollout/decode": measure.CompiledFigures("rollout/decode", inside=inside, beside={})
        }
        sweep = {"temporaries": usable}  # the cache is gone by then
        figures["sweep/turn"] = measure.CompiledFigures("sweep/turn", inside=sweep, beside={})
        return search._most_cache(setup, figures)

    assert left(2**30) == int(1000 * plan.bytes / 2**30) / 1000  # no more than all conversations
    assert left(-plan.bytes) is None


@needs_libtpu
def test_no_cache_is_searched_for_beside_programs_that_hold_none(setup, monkeypatch):
    monkeypatch.setattr(search, "_tokens_fit", lambda *_: True)
    alone = measure.CompiledFigures("rollout/reshard", inside={"parameters": 1}, beside={})
    assert search.search(setup, {"rollout/reshard": alone}).keys() == {"batching.microbatch_tokens"}


@needs_libtpu
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--topology=v5e:3x3"], "--topology: got 'v5e:3x3'; allowed for v5e: 1x1, 2x2"),
        (["--topology=v9:2x2"], "--topology: got 'v9:2x2'; allowed: CHIP:SHAPE as in v5p:4x4x4"),
        (["--config.mesh.fsdp=3"], "config.mesh: got .* allowed: a product of 4"),
        (
            ["--config.rollout.tasks=3", "--config.rollout.group_size=3"],
            "a multiple of the 2 devices",
        ),
        (["--config.model.path=somewhere/GPT-5"], "allowed without its files: .* Qwen3-14B"),
        (["--config.rollout.grammar=tool_calls"], "none where the model's tokenizer is not here"),
        (["--programs=sweep/turm"], "--programs: got 'sweep/turm'; allowed: sweep/score, sweep"),
        (["--config.seed=-1"], "config.seed: got -1"),
        (["--config.rollout.devices=1"], "config.rollout.devices: got 1; allowed in aot: 0"),
    ],
)
def test_a_mistake_is_one_sentence(flags, said, capsys):
    assert run(*flags) == 2
    assert re.search(said, sentence(capsys))


@needs_libtpu
def test_a_mistake_in_programs_is_refused_before_the_search(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[main.__module__], "tune", lambda *_: pytest.fail("searched"))
    assert run("--programs=sweep/turm", f"--tune={tmp_path / 'layouts.json'}") == 2
    assert sentence(capsys).startswith("error: --programs: got 'sweep/turm'; allowed: sweep/")


@pytest.mark.parametrize("where", [["--json=out.json"], ["--json", "out.json"]])
def test_the_recorded_command_does_not_name_the_file_that_it_is_in(where):
    asked = ["--config=package:quickstart", "--topology", "v5e:2x2"]
    for arguments in ([*where, *asked], [*asked, *where]):
        assert _command(["aot", *arguments]) == " ".join(asked)


def test_without_libtpu_the_command_says_what_to_install(capsys, monkeypatch):
    def missing(**_):
        raise RuntimeError("no plugin")

    monkeypatch.setattr(chips.topologies, "get_topology_desc", missing)
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert run() == 2
    assert "needs libtpu" in sentence(capsys)


@pytest.mark.parametrize(
    ("name", "parameters"),  # as the safetensors of the model's page on Hugging Face add up
    [
        ("Qwen3-14B", 14_768_307_200),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-1.7B", 1_720_574_976),
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen2.5-14B-Instruct", 14_770_033_664),
        ("Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen2.5-0.5B-Instruct", 494_032_768),
    ],
)
def test_the_architectures_in_the_package_have_the_published_parameters(name, parameters):
    assert flops.parameters(load_architecture(f"package:architectures/{name}")) == parameters


@needs_libtpu
def test_the_layout_of_the_shortest_iteration_is_found_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune, "COMPILED", 1)
    file = tmp_path / "layouts.json"
    file.write_text('{"v5p:4x4x4": {"mesh": {"fsdp": 64}}}')
    choices = ("--config.offload.optimizer=True", "--programs=rollout/reshard")
    assert run(f"--tune={file}", *choices) == 0
    output = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found.keys() == {"v5p:4x4x4", "v5e:2x2"}  # others' stay
    tuned = found["v5e:2x2"]
    searched = {"mesh", "model.remat", "rollout.mesh", "rollout.concurrency"}
    assert tuned.keys() == {"offload.optimizer", *searched}  # what it was found with
    assert tuned["model.remat"] == "none" and tuned["rollout.concurrency"] == 8
    assert output.count("an iteration of") == 2
    mesh = " x ".join(f"{axis} {size}" for axis, size in tuned["mesh"].items() if size > 1)
    assert f"mesh: {mesh}; the sampler's: " in output


@needs_libtpu
def test_what_is_expected_of_a_program_is_near_what_the_compiler_says(report, setup):
    """FLOPs and memory traffic are the same; communication is of the same order."""
    for kind in ("sweep/turn", "sweep/score", "rollout/prefill", "rollout/decode"):
        (program,) = choose_programs(list_programs(setup), [kind])
        expected, measured = expected_figures(setup, program), report["programs"][kind]
        assert expected.executed_flops == measured["executed_flops"]
        assert expected.roofline.memory_s == measured["roofline"]["memory_s"]
        ratio = measured["roofline"]["network_s"] / expected.roofline.network_s
        assert 0.4 < ratio < 2.5, (kind, ratio)


@needs_libtpu
def test_experts_that_lie_on_an_axis_of_their_own_are_not_gathered_over_fsdp():
    """Of 30.5 billion parameters 48 layers x 128 experts x 3 x 2048 x 768 lie on `expert`."""
    model = "model.path=package:architectures/Qwen3-30B-A3B"
    small = ("batching.buckets=(18432,)", "rollout.tasks=8", "rollout.mesh=none")
    seconds, traffic = [], ()
    for mesh in ("{'fsdp': 1, 'context': 2, 'tensor': 4}", "{'fsdp': 8, 'tensor': 1}"):
        sizes = (f"mesh={mesh}", "mesh.data=1", "mesh.expert=8")
        config = load_config("package:qwen3_14b_bfcl", [model, *small, *sizes])
        made = prepare(config, chips.parse_topology("v6e:8x8"))
        programs = {each.kind: each for each in choose_programs(list_programs(made))}
        figures = {kind: expected_figures(made, each) for kind, each in programs.items()}
        seconds.append(tune.MeshChoice({}, made, 0, programs, figures).seconds)
        traffic = figures["sweep/turn"].collectives
    assert seconds[1] < seconds[0]
    experts = 48 * 128 * 3 * 2048 * 768
    held = 30_532_122_624 - experts + experts / 8
    for kind, size in (("all-gather", 2), ("reduce-scatter", 4)):  # bfloat16, float32
        (each,) = (t for t in traffic if t.kind == kind)
        assert (each.axes, each.bytes) == (("fsdp",), size * held * 7 / 8)


@needs_libtpu
@pytest.mark.parametrize("end", [tpu_cases.crash, tpu_cases.refuse])
def test_a_compiler_that_fails_ends_no_search(tmp_path, capsys, monkeypatch, end):
    monkeypatch.setattr(tune, "COMPILED", 1)
    monkeypatch.setattr(tune, "_figures", end)
    assert run(f"--tune={tmp_path / 'layouts.json'}") == 2
    output = capsys.readouterr()
    assert "model.remat none: the compiler fails" in output.out
    assert output.err.startswith("error: --tune: none of the layouts that were compiled fits")


@needs_libtpu
def test_what_needs_as_much_as_a_layout_that_did_not_fit_is_not_compiled(setup, monkeypatch):
    compiled = []

    def too_large(choice, kinds, log):
        compiled.append(choice.needs)
        return choice._replace(
            figures={kinds[0]: measure.CompiledFigures(kinds[0], error="too large")}
        )

    monkeypatch.setattr(tune, "_compiled", too_large)
    ranked = [choice.needs for choice in tune._ranked("sweep", setup, tune.sweep_fields(setup))]
    assert tune._shortest("sweep", setup, tune.sweep_fields(setup), print) is None
    assert ranked != sorted(ranked, reverse=True)  # by seconds, some need more than one before
    assert compiled == [n for i, n in enumerate(ranked) if n < min(ranked[:i], default=n + 1)][:8]


@needs_libtpu
def test_no_layout_that_fits_is_one_sentence(tmp_path, capsys):
    wide = ("--config.model.mlp_width=2097152", "--config.model.layers=8")  # 19 billion parameters
    assert run(*wide, f"--tune={tmp_path / 'layouts.json'}") == 2
    assert sentence(capsys).startswith("error: --tune: none of the layouts")
    assert not (tmp_path / "layouts.json").exists()
