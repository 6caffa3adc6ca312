"""The notebook runs from its first cell to its last, and shows what docs/python.md explains."""

import ast
import os
import re

import nbformat
import pytest
from loaded_python import WITHOUT_TORCH
from nbclient import NotebookClient
from places import ROOT
from process_cases import QUICK_XLA

import seeupo_jax

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The notebook after all of its cells were executed by a kernel, and where."""
    place = tmp_path_factory.mktemp("notebook")
    book = nbformat.read(NOTEBOOK, as_version=4)
    path = os.pathsep.join([WITHOUT_TORCH, str(ROOT), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("XLA_FLAGS", QUICK_XLA)  # one device
        client = NotebookClient(book, timeout=500, resources={"metadata": {"path": str(place)}})
        client.execute()
    return book, place


def outputs(book, number):
    """The text that a code cell printed, and its value."""
    cell = [cell for cell in book.cells if cell.cell_type == "code"][number]
    printed = "".join(out["text"] for out in cell.outputs if out.output_type == "stream")
    values = [out["data"]["text/plain"] for out in cell.outputs if out.output_type[:4] == "exec"]
    return printed, *values


def test_a_run_in_a_kernel_writes_its_lines_and_leaves_its_policy(played):
    book, place = played
    (printed,) = outputs(book, 0)
    assert re.search(r"^iteration 2/2  success 0\.\d\d", printed, re.MULTILINE), printed
    assert "\x1b" not in printed
    assert (place / "runs" / "python" / "policy" / "model.safetensors").is_file()


def test_the_cells_show_metrics_figures_and_failures(played):
    book, _ = played
    assert 0 <= float(outputs(book, 1)[1]) <= 1
    table, interval = outputs(book, 2)
    assert table.splitlines()[0].split() == ["tasks", "failed", "avg@2", "pass@2"]
    value, low, high = ast.literal_eval(interval)
    assert low <= value <= high
    assert outputs(book, 3)[0].strip()


def test_the_notebook_has_no_outputs_and_the_code_of_the_page():
    cells = [c for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    for block, cell in zip(BLOCKS, cells, strict=False):
        assert cell.source.startswith(block.rstrip("\n"))


def test_the_page_names_what_the_package_has():
    trees = [ast.parse(block) for block in BLOCKS]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in nodes for alias in node.names}
    assert {node.module for node in nodes} == {"seeupo_jax"} and names <= set(seeupo_jax.__all__)
    page = (ROOT / "docs" / "python.md").read_text()
    received = {name for name in vars(seeupo_jax.Callback) if name.startswith("on_")}
    assert set(re.findall(r"^\| `(on_\w+)\(", page, re.MULTILINE)) == received
