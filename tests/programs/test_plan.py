"""The plan: what it adds up is what the arrays are, and what it advises would fit."""

import json
import shlex
import sys

import pytest
from typer.testing import CliRunner

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.cli import plan as cli
from ninfer_jax.cli.main import app
from ninfer_jax.config import EngineConfig as Config
from ninfer_jax.config import preset, recipe
from ninfer_jax.programs import Programs
from ninfer_jax.programs.card import Compilation
from ninfer_jax.programs.plan import CONTEXT_ALLOWANCE, WORKSPACE_ALLOWANCE, make_plan, resident_bytes
from ninfer_jax.programs.setup import model_of, resolve

RUN = CliRunner()
engine_module = sys.modules[Engine.__module__]


def compilation(name: str, temporary: int) -> Compilation:
    return Compilation(name, "rtx4090", 0.0, 0.0, __import__("collections").Counter(), 0, 0, 0, 0, 0, 0, 0, 0, temporary)


def plan_27b(**shapes: object):
    engine = Config(**{"context": 262_144, "kv": "rk4v4-e8", "draft": 3, "prefill_chunk": 1024} | shapes)
    setup = resolve(preset("qwen3_8_27b"), 248_077, engine, "cuda", recipe("q4"))
    compiled = {name: (compilation(name, 100 << 20), 4 << 20) for name in setup.programs().serving}
    return setup, make_plan(setup, "rtx4090", 25_393_692_672, compiled)


def test_the_27b_by_hand() -> None:
    """Pages: 16 attention layers and the MTP layer x 4 KV heads x 272 bytes a token, and page 0. States: 48 layers of 48
    128 x 128 float32 matrices, and for the rows that wait rings of 2 x (3 + 1) rows: 10,240 bfloat16 inputs, and in float32 keys
    of 16 heads, values of 48, and a decay and a beta of each of the 48."""
    _, made = plan_27b()
    assert made.kv == 17 * 4 * 272 * (262_144 + 64)
    gdn = 48 * (48 * 128 * 128 * 4 + 8 * (10_240 * 2 + (16 * 128 + 48 * 128 + 48 + 48) * 4))
    assert gdn < made.state < gdn + (4 << 20)  # sampling: counts, biases and flags of 248,320 ids
    body = 64 * 3 * 5120 * 17_408 + 16 * (5120 * 14_336 + 6144 * 5120) + 48 * (5120 * 16_384 + 6144 * 5120)
    by_role = made.weights
    columns = 64 * (2 * 17_408 + 5120) + 16 * (14_336 + 5120) + 48 * (16_384 + 5120)  # each with a float32 unit
    assert by_role["mlp"] + by_role["attention"] + by_role["gdn"] == body * (0.5 + 1 / 64) + 4 * columns
    assert by_role["head"] == 248_320 * (5120 * (1 + 1 / 128) + 4)
    assert by_role["embed"] == 248_320 * 5120 * (0.5 + 2 / 64)
    # One slot's matrices and window of three inputs a layer, the last hidden, and what says where it stands.
    assert made.staging == 48 * (48 * 128 * 128 * 4 + 3 * 10_240 * 2) + 5120 * 2 + 4 + 4 + 1
    assert made.workspace["snapshot"] == 0  # 100 MiB are less than its result, for which there is room
    assert max(made.workspace.values()) == 100 << 20 and made.executables == 12 * (4 << 20)


@pytest.mark.parametrize("slots", [1, 4])
def test_who_drafts_by_hand(slots: int) -> None:
    """To look drafts up takes four bytes a token of the context and slot, and nothing else; without the MTP head go its layer's
    pages and its weights."""
    pool = slots * 262_144
    (_, head), (_, both), (_, lookup), (_, none) = (
        plan_27b(slots=slots, drafter=drafter) for drafter in ("mtp", "mtp+lookup", "lookup", "none")
    )
    assert both.state - head.state == 4 * pool and both.kv == head.kv and both.weights == head.weights
    assert head.kv - lookup.kv == head.kv - none.kv == 4 * 272 * (pool + 64)
    assert lookup.weights == none.weights and head.weights["mtp"] > 400 << 20 and "mtp" not in lookup.weights
    assert {role for role in lookup.weights if lookup.weights[role] != head.weights[role]} == {"norm"}
    assert lookup.state == both.state and lookup.staging == none.staging == head.staging


@pytest.mark.parametrize("drafter", ["mtp", "mtp+lookup"])
@pytest.mark.long
def test_the_advised_context_fits_and_one_page_more_does_not(drafter: str) -> None:
    _, made = plan_27b(slots=4, drafter=drafter)
    assert not made.fits and made.slack < 0
    for format, tokens in made.max_context.items():
        if tokens in (0, 262_144):
            continue
        _, at = plan_27b(slots=4, drafter=drafter, kv=format, context=tokens)
        _, beyond = plan_27b(slots=4, drafter=drafter, kv=format, context=tokens + 64)
        # Block tables grow with the context too, by 64 bytes a page and slot.
        assert at.slack > -(1 << 20) and beyond.slack < at.slack
        assert beyond.slack < (1 << 20)
    assert made.max_context["rk4v4-e8"] == made.max_context["rk4v4"] > made.max_context["int8"] > made.max_context["bf16"]


def test_the_command_over_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 3, both byte counts and what would fit; on the CPU, with a card of 60 MB, which weights and states would fit."""
    monkeypatch.setattr(cli, "host_bytes", lambda: 60_000_000)
    serving = resolve(*model_of("tiny"), EngineConfig(), "cpu").programs().serving
    compiled = {name: (compilation(name, 30_000_000), 1000) for name in serving}
    monkeypatch.setattr(cli, "_compile", lambda *arguments: compiled)
    shapes = "--context", "4096", "--slots", "4", "--pool", "8192", "--prefill-chunk", "64", "--prefix-cache", "off"
    done = RUN.invoke(app, ["plan", "tiny", "--target", "cpu", *shapes, "--compiled", "--json"], prog_name="ninfer-jax")
    assert done.exit_code == cli.OVER_BUDGET
    facts = json.loads(done.stdout)
    assert facts["workspace_bytes"] == 30_000_000 and facts["executables_bytes"] == 1000 * len(serving)
    assert not facts["fits"] and facts["slack_bytes"] == facts["card_bytes"] - facts["total_bytes"] < 0
    keys = {
        "weights_bytes",
        "kv_bytes",
        "state_bytes",
        "workspace_bytes",
        "total_bytes",
        "card_bytes",
        "slack_bytes",
        "fits",
        "max_context",
    }
    assert keys <= facts.keys()
    assert f"{facts['total_bytes']:,}" in done.stderr and "60,000,000" in done.stderr
    assert facts["workspace_how"] == "compiled" and facts["configuration"]["draft"] == 0 and facts["chosen"] == ["kv", "draft"]
    # What would fit takes as much less as the compiler asked for more than the bound.
    commands = [line.removeprefix("  fits: ") for line in done.stderr.splitlines() if line.startswith("  fits: ")]
    assert len(commands) == 3 and all(command.startswith("ninfer-jax plan tiny ") for command in commands)
    for command in commands:
        words = [word for word in shlex.split(command)[1:] if word != "--compiled"]
        other = RUN.invoke(app, words)
        left = json.loads(other.stdout)
        assert left["slack_bytes"] >= facts["workspace_bytes"] - left["workspace_bytes"], command


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plan", "qwen4"], "qwen4: No such file or directory; a model is a directory"),
        (["plan", "qwen3_8_27b", "--target", "gtx480"], "gtx480"),
        (["plan", "qwen3_8_27b", "--recipe", "q3"], "known recipes: q4"),
        (["plan", "qwen3_8_27b", "--kv", "q4"], "known formats"),
        (["plan", "qwen3_8_27b", "--slots", "9"], "slots is 9"),
        (["plan", "qwen3_8_27b", "--prefix-cache", "some"], "prefix_cache is 'some', known are auto, exact, fast, off"),
        (["plan", "qwen3_8_27b", "--cache-bytes", "100000"], "100,000 bytes of host memory hold no checkpoint of this model"),
    ],
)
def test_bad_arguments_in_one_line(arguments: list[str], message: str) -> None:
    done = RUN.invoke(app, arguments)
    assert done.exit_code == 1 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_plan_without_a_compiler_allows_for_what_it_would_say() -> None:
    setup, compiled = plan_27b()
    allowed = make_plan(setup, "rtx4090", compiled.card)
    assert allowed.resident == compiled.resident == resident_bytes(setup.programs())
    assert allowed.total == allowed.resident + WORKSPACE_ALLOWANCE + CONTEXT_ALLOWANCE
    assert allowed.json()["workspace_by_program"] == {"allowance": WORKSPACE_ALLOWANCE}


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("compiled", "compile_all", "lowered"):
        monkeypatch.setattr(Programs, method, lambda *arguments: pytest.fail("compiled"))
    monkeypatch.setattr("ninfer_jax.programs.executables.compile_program", lambda *arguments: pytest.fail("compiled"))


def test_what_cannot_fit_is_not_compiled(nothing_is_compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """The 27B in bfloat16 takes twice the card; nothing of the compiler is needed to know it."""
    done = RUN.invoke(app, ["plan", "qwen3_8_27b", "--recipe", "none", "--target", "rtx4090", "--compiled"])
    assert done.exit_code == cli.OVER_BUDGET and "even without pages" in done.stderr
    assert "allowance" in done.stdout and "compiled" not in done.stdout
    monkeypatch.setattr("pallas_kernels.deviceless.start", lambda target: None)
    compile = ["compile", "qwen3_8_27b", "--recipe", "none", "--target", "h200,rtx4090", "--out", str(tmp_path / "out")]
    done = RUN.invoke(app, compile, prog_name="ninfer-jax")
    line, *commands = done.stderr.strip().splitlines()
    assert done.exit_code == 1 and "are needed" in line and "free on rtx4090" in line and not (tmp_path / "out").exists()
    assert len(commands) == 3 and all("fits: ninfer-jax compile qwen3_8_27b" in command for command in commands)
    assert commands[0].endswith("--recipe q4-quality") and commands[1].endswith("--recipe q4")


def test_mistakes_of_compile_do_not_wait_for_the_compiler(
    nothing_is_compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """Those of the last target and of the report, which is written when all is done, too."""

    def refused(*arguments: str) -> str:
        done = RUN.invoke(app, ["compile", "tiny", "--context", "64", "--out", str(tmp_path / "out"), *arguments])
        (line,) = done.stderr.strip().splitlines()
        assert done.exit_code == 1, done.output
        return line

    monkeypatch.setattr("pallas_kernels.deviceless.missing_tools", lambda: ["nvidia-cuda-nvcc-cu12"])
    assert "needs nvidia-cuda-nvcc-cu12" in refused("--target", "cpu,rtx4090")
    assert "is a directory" in refused("--target", "cpu", "--report", str(tmp_path))
    assert "--target is ','" in refused("--target", ",")
    monkeypatch.setattr("pallas_kernels.deviceless.start", lambda target: None)
    (tmp_path / "out/rtx4090").mkdir(parents=True)
    (tmp_path / "out/rtx4090/thesis.tex").write_text("years")
    assert "something else" in refused("--target", "cpu,rtx4090")


def test_an_engine_that_cannot_fit_is_refused_before_a_weight_is_read(
    nothing_is_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: 1_000_000)
    monkeypatch.setattr("ninfer_jax.engine.weights_in.load_parameters", lambda *a, **k: pytest.fail("read"))
    with pytest.raises(ValueError, match="memory: .* bytes are needed.* 1,000,000 are free") as caught:
        Engine.load(tiny_path(), EngineConfig(context=256, prefill_chunk=64))
    assert "\n" not in str(caught.value)


def test_an_engine_whose_workspace_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the compiler can tell is asked once it has; the free bytes are those from before the weights were there."""
    config = EngineConfig(context=256, prefill_chunk=64, kv="f32", draft=0, slots=1)  # nothing open, and so no bound is asked
    resident = resident_bytes(resolve(*model_of("tiny"), config, "cpu").programs())
    free = iter((resident + 12_345, resident + 12_345, 0))  # for the choice, and for the checks
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: next(free))
    monkeypatch.setattr(Programs, "compile_all", lambda *arguments: None)
    monkeypatch.setattr(engine_module, "compiled_workspace", lambda programs: 12_346)
    with pytest.raises(ValueError, match=f"memory: {resident + 12_346:,} bytes .*workspace, {resident + 12_345:,} are free"):
        Engine.load(tiny_path(), config)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt", "word " * 200], "the context holds 64"),
        (["--tokens", "1,2,5000"], "prompt holds token id 5000"),
        (["--prompt", "x", "--top-p", "2"], "top_p"),
        (["--prompt", ""], "prompt is empty"),
        (["--messages", "FILE"], "role"),
    ],
)
def test_a_request_that_the_engine_would_refuse_is_refused_before_a_weight_is_read(
    arguments: list[str], message: str, nothing_is_compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr("ninfer_jax.engine.weights_in.load_parameters", lambda *a, **k: pytest.fail("read"))
    (tmp_path / "chat.json").write_text(json.dumps([{"role": "emperor", "content": "hail"}]))
    arguments = [str(tmp_path / "chat.json") if word == "FILE" else word for word in arguments]
    done = RUN.invoke(app, ["generate", "tiny", "--context", "64", *arguments])
    (line,) = done.stderr.strip().splitlines()
    assert done.exit_code == 1 and message in line, done.output
