"""The table of what works with what: each row is true by a test."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS, ROOT, text_of

# By library and by the row's second cell, the test that the row is true by.
TESTS = {
    ("`torch.compile`", "`sg.wrap(torch.compile(module))`"): (
        "tests/module/test_torch_transforms.py",
        "test_a_compiled_module_can_be_wrapped",
    ),
    ("`torch.compile`", "`torch.compile(sg.wrap(module))`"): (
        "tests/module/test_torch_transforms.py",
        "test_a_wrapper_that_is_compiled_says_that_its_graphs_are_not_used",
    ),
    ("TorchScript", "`torch.jit.script(sg.wrap(module))`"): (
        "tests/module/test_scripted.py",
        "test_torch_jit_script_compiles_the_plain_module",
    ),
    ("TorchScript", "`sg.wrap(scripted)`"): (
        "tests/module/test_scripted_parts.py",
        "test_a_torchscript_module_itself_is_served_in_a_sequential",
    ),
    ("TorchScript", "a scripted, traced or loaded module inside"): (
        "tests/module/test_scripted_parts.py",
        "test_a_module_with_a_torchscript_part_is_served",
    ),
    ("TorchScript", "the same, with `training=True`"): (
        "tests/module/test_scripted_parts.py",
        "test_a_pair_of_graphs_holds_no_parameters_of_torchscript",
    ),
    ("DDP", "`DDP(sg.wrap(module, training=True))`"): (
        "tests/training/test_data_parallel.py",
        "test_a_replica_around_a_wrapped_module_trains_by_graphs",
    ),
    ("DDP", "`sg.wrap(DDP(module), training=True)`, or DDP in a step"): (
        "tests/training/test_data_parallel.py",
        "test_replicas_train_as_in_eager_and_are_refused_by_name",
    ),
    ("FSDP2", "`sg.wrap(fully_shard(module))`, inference"): (
        "tests/distributed/test_sharded.py",
        "test_a_module_sharded_by_fsdp_is_served_as_in_eager",
    ),
    ("FSDP2", "a training step over sharded parameters"): (
        "tests/distributed/test_sharded.py",
        "test_a_step_that_trains_a_sharded_module_runs_eagerly_by_name",
    ),
    ("accelerate", "an offloaded model in `graph_generation`, `graph_encoder`"): (
        "tests/integrations/test_accelerate.py",
        "test_an_offloaded_encoder",
    ),
    ("accelerate", "`sg.wrap` of an offloaded module"): (
        "tests/integrations/test_accelerate.py",
        "test_wrapping_an_offloaded_module_is_right_at_every_call",
    ),
    ("peft", "`sg.wrap(model)`, adapters switched, merged, added"): (
        "tests/integrations/test_adapters.py",
        "test_a_change_and_its_undoing_are_followed",
    ),
    ("quantization", "int8 weights and scales as buffers"): (
        "tests/module/test_state_key.py",
        "test_quantised_buffers_made_lazily_and_replaced_later",
    ),
    ("quantization", "quantized tensors as arguments"): (
        "tests/module/test_inputs.py",
        "test_a_quantized_tensor_is_eager_with_a_reason",
    ),
}


def rows() -> list[tuple[str, str, str]]:
    """Return library, code and outcome of each row; a row without a library is of the one above it."""
    part = text_of(DOCS / "production.md").partition("## What works with what")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")
    ]
    found, library = [], ""
    for name, code, outcome, _ in cells[2:]:
        library = name or library
        found.append((library, code, outcome))
    return found


def test_each_row_of_the_matrix_has_an_outcome_and_a_test() -> None:
    assert [(library, code) for library, code, _ in rows()] == list(TESTS)
    assert {outcome for _, _, outcome in rows()} <= {"works", "eager", "refused", "works, or eager"}


@pytest.mark.parametrize(("path", "name"), TESTS.values())
def test_a_test_that_a_row_is_true_by_exists(path: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
