"""The commands that measure the tables of the documentation, with their time limits."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping

from bench.serve.serving import ARMS as SERVE_ARMS
from bench.tools.options import written
from bench.training.step_arms import ARMS as TRAINING_ARMS
from bench.transformers_generate.families import FAMILIES

JSON = "{json}"
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}
_MODEL_TABLES = ("model-table", "model-table-summary", "model-table-names")
_GENERATE_ARMS = "plain,static-compiled,simplegraph"
_STARTED = "eager,simplegraph,plain-loop,lean-loop,simplegraph-lazy,simplegraph-piecewise,simplegraph-fused"
_PRELOADED = ("--arms", "eager,simplegraph,plain-loop,lean-loop", "--preloaded", "--rounds", "2")
# Those that are compared first: what a time limit cuts is last.
_COMPARED = "simplegraph,compiled-piecewise,eager,lean-loop,plain-loop,simplegraph-piecewise"
_SUITE = ("-m", "pytest", "bench/startup", "--benchmark-only", "--arms", _COMPARED, "--rounds", "2")
_GENERATED = ("--arms", f"{_GENERATE_ARMS},simplegraph-8-tokens", "--processes", "2")
_MEMORY = ("--workloads", "vit-b-64", "--arms", "eager,train-step,hand-made,forward-backward")
_LATENCY = (
    "--models",
    "ten-layers,resnet18,resnet50,efficientnet,vit,bert,llama-24,decoder-2,8b-step",
    "--total",
    "560",
)
_SPECULATION = [name for name in SERVE_ARMS if name not in ("full", "full-decode-only")]
_AT_ONCE = ("--models", ",".join(FAMILIES), "--arms", "static-compiled,simplegraph", "--at-once", str(len(FAMILIES)))


@dataclasses.dataclass(frozen=True)
class Job:
    """One command, which writes one file of figures.

    Attributes:
        file: of the figures, without ".json", as `docs.tools` reads it below `bench/results`.
        command: arguments of Python, with `JSON` in the place of the file.
        tables: of the documentation that show its figures; jobs without any run only if they are named.
        seconds: time limit.
        gpus: how many it needs.
        variables: set in its environment.
    """

    file: str
    command: tuple[str, ...]
    tables: tuple[str, ...] = ()
    seconds: float = 580.0
    gpus: int = 1
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def is_named(self, patterns: Iterable[str]) -> bool:
        """True if a pattern matches the file, its last part, or one of the tables."""
        names = (self.file, self.file.rpartition("/")[2], *self.tables)
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns for name in names)


HEADLINE = "headline"  # folder of what README and the first screen of docs/figures.md show
HEADLINE_SECONDS = 25 * 60


def headline_jobs() -> list[Job]:
    """List the jobs of README's and the first tables, the most important first: at one commit, on one GPU."""
    commands = {
        "models": (_command("bench.optimized", "--batches", "1", "--at-once", "8", "--total", "400"), ("readme",), 420),
        "startup": (
            _command("bench", "--arms", _STARTED, "--rounds", "2", "--timeout", "150"),
            ("startup", HEADLINE),
            400,
        ),
        "model_calls": (_command("bench.host_overhead.models", "--parts", "mixed,lazy"), (HEADLINE,), 150),
        "engine": (
            _command("bench.serve.decode_steps", "--attention", "triton", "--beside", "eager"),
            (HEADLINE,),
            200,
        ),
        "training_memory": (_command("bench.training", *_MEMORY), ("training-memory", HEADLINE), 150),
        "vllm": (_command("bench.serve.beside_vllm"), (HEADLINE,), 500),
    }
    return [Job(f"{HEADLINE}/{name}", *job) for name, job in commands.items()]


def all_jobs() -> list[Job]:
    """List every job: those of one GPU, of several, and of families of models."""
    return [
        *headline_jobs(),
        *_one_gpu(),
        *_serving(),
        *_modules(),
        *_several_gpus(),
        *_families(),
    ]


def _command(module: str, *options: str) -> tuple[str, ...]:
    return ("-m", module, *options, "--json", JSON)


def _one_gpu() -> list[Job]:
    return [
        Job("h200_startup", (*_SUITE, "--benchmark-json", JSON), ("startup-beside-compiled",)),
        Job("h200_startup_preloaded", _command("bench", *_PRELOADED), ("startup-preloaded",)),
        Job("h200_engine_steps", _command("bench.serve.decode_steps"), ("decode", "generation")),
        Job("h200_transformers", _command("bench.transformers_generate", *_GENERATED), ("generate",)),
        Job("h200_generate", _command("bench.transformers_generate", *_AT_ONCE), ("tokens",)),
        Job("h200_spec_decode", _command("bench.spec_decode"), ("speculative",)),
        Job("h200_model_calls", _command("bench.host_overhead.models"), ("model-calls",), seconds=150),
        Job(
            "h200_latency",
            _command("bench.latency", "--guards", "--compiled", *_LATENCY),
            ("latency", "latency-back-to-back", "readme"),
        ),
        Job(
            "h200_tail",
            _command("bench.latency", "--models", "ten-layers,resnet18,bert", "--tail", "5000"),
            ("latency-slowest",),
            seconds=200,
        ),
        Job("h200_sleep", _command("bench.sleep"), ("sleep",), seconds=300),
        Job("h200_host_overhead", _command("bench.host_overhead"), ("host",), seconds=300),
        Job("h200_advise", _command("bench.advise"), ("advise",), seconds=280),
        Job("h100_host_inputs", _command("bench.host_inputs"), ("host-inputs",), seconds=100),
        Job("h200_model_table", _command("bench.model_table", "--workers", "12", "--total", "480"), _MODEL_TABLES),
        Job("h200_layer_kinds", _command("bench.layer_kinds"), ("kinds-steps",)),
        Job("h200_hybrid", _command("bench.layer_kinds", "--kinds", "hybrid"), ("kinds-steps",), seconds=300),
        Job("h200_accuracy", _command("bench.accuracy"), ("accuracy",), seconds=300),
        Job("h200x4_consensus", _command("bench.host_overhead.consensus"), ("consensus",), seconds=200, gpus=0),
    ]


def _serving() -> list[Job]:
    loads = ("--rate", "60", "--requests", "600"), ("--rate", "20,40,80", "--requests", "100", "--limit", "540")
    arms = ("eager", "full-decode-only", "full-and-piecewise", "compiled-piecewise"), _SPECULATION
    files = ("h200_serve", "serving"), ("h200_serve_speculation", "serving-speculation")
    rates = ("bench.serve", "--attention", "fa3", "--arms", "eager,full,full-and-piecewise", "--rate", "20,40,80")
    return [
        Job("h100_serve_rates", _command(*rates, "--requests", "40"), ("serving-rates",), seconds=200),
        *(
            Job(file, _command("bench.serve", "--attention", "triton", *load, "--arms", _names(some)), (table,))
            for (file, table), load, some in zip(files, loads, arms, strict=True)
        ),
    ]


def _modules() -> list[Job]:
    """List those of modules as they are, and of training; some have no table."""
    shapes = ("--workloads", "vit-b-64", "--shapes", "vit-b-64", "--arms", "eager,train-step")
    autotuned = ("--models", "resnet18,vit,bert", "--arms", "eager,optimized,compiled,compiled-max-autotune")
    ahead = ("--models", "resnet18,vit,bert", "--arms", "eager,graph,optimized,aot-inductor")
    compilers = "eager,optimized,compiled-warm,compiled-freezing"  # with more, no row is done within the limit
    in_turn, sizes = "eager,graph,optimized,compiled", ("--batches", "1,2,4,8")
    at_once = ("--at-once", "8", "--total", "540")
    first = ("--workloads", "mlp,dqn", "--arms", "eager,train-step,compiled-reduce-overhead")
    graphs = (
        "--workloads",
        "two-linears,two-linears-autocast,mlp,vit-b-8",
        "--arms",
        "eager,forward-backward,make-graphed-callables",
    )
    return [
        Job("h200_optimized", _command("bench.optimized", "--at-once", "8", "--total", "540"), ("optimized",)),
        Job("h200_fused_operators", _command("bench.fused_operators"), ("fused-operators",)),
        Job(
            "h200_training", _command("bench.training", "--arms", _names(TRAINING_ARMS)), ("training", "training-start")
        ),
        Job("h200_training_first", _command("bench.training", *first), ("training-start",), seconds=300),
        Job("h200_training_pairs", _command("bench.training", *graphs), ("training-pairs",), seconds=300),
        Job("h200_training_shapes", _command("bench.training", *shapes)),
        Job("h200_optimized_autotuned", _command("bench.optimized", *autotuned, "--batches", "1")),
        Job("h200_optimized_ahead", _command("bench.optimized", *ahead, "--batches", "1"), seconds=400),
        Job(
            "h200_compilers",
            _command("bench.optimized", "--arms", compilers, *at_once, "--batches", "1"),
            ("other-compilations",),
        ),
        Job(
            "h200_sizes_in_turn",
            _command("bench.optimized", "--arms", in_turn, *at_once, "--in-turn", *sizes),
            ("optimized-in-turn",),
        ),
    ]


def _names(names: Iterable[str]) -> str:
    """Join names as command lines take them."""
    return ",".join(map(written, names))


def _several_gpus() -> list[Job]:
    return [
        _ranks("h200x2_tp2", 2, ("two-gpus",), "--rounds", "1"),
        _ranks("h200x2_tp2_compiled", 2, ("two-gpus",), "--arms", "compiled-piecewise"),
        _ranks(
            *("h200x2_dtensor", 2, ("dtensor",), "--rounds", "1"),
            *("--arms", "simplegraph,simplegraph-dtensor", "--sizes", "1,64,256"),
        ),
        _ranks("h100x2_two_batch", 2, ("two-batch",), module="bench.two_batch"),
        _ranks("h200x4_tp4_70b", 4, ("four-gpus",), "--model", "70b", "--rounds", "1", "--arms", "simplegraph,eager"),
        _ranks("h200x4_tp4_70b_compiled", 4, ("four-gpus",), "--model", "70b", "--arms", "compiled-piecewise"),
        _ranks(
            *("h200x8_tp8_70b", 8, ("eight-gpus", "eight-gpus-parts")),
            *("--model", "70b", "--rounds", "1", "--arms", "simplegraph,plain-loop"),
        ),
        _ranks(
            *("h200x8_tp8_70b_eager", 8, ()),
            *("--model", "70b", "--rounds", "1", "--arms", "eager,simplegraph-piecewise"),
        ),
        _ranks("h200x8_tp8_70b_compiled", 8, ("eight-gpus",), "--model", "70b", "--arms", "compiled-piecewise"),
    ]


def _ranks(file: str, ranks: int, tables: tuple[str, ...], *options: str, module: str = "bench") -> Job:
    """Return a benchmark, that of the startup by default, with tensor parallelism."""
    launched = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    line = (*launched, *_command(module, "--tp", str(ranks), *options))
    return Job(file, line, tables, gpus=ranks, variables=_NO_MULTICAST)


def _families() -> list[Job]:
    return [
        Job(
            f"h200x4_models/generate_{name}",
            _command("bench.transformers_generate", "--models", name, "--arms", _GENERATE_ARMS),
            ("families",),
        )
        for name in FAMILIES
    ]
