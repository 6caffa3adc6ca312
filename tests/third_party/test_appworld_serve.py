"""What a pool of AppWorld servers writes for its clients; without AppWorld itself."""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "third_party" / "appworld"


@pytest.fixture
def make_pool(tmp_path, monkeypatch):
    """Makes pools of two servers that are not started, all with one file."""
    for name in ("server", "serve"):  # the latter imports the former
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    options = argparse.Namespace(servers=2, port=0, request_s=50.0, file=tmp_path / "pool")
    with contextlib.ExitStack() as made:

        def make():
            pool = module.Pool(options, tmp_path)
            for listener in pool._listeners:
                made.enter_context(listener)
            for end in (pool._pipe, pool._end):
                made.callback(os.close, end)
            made.callback(shutil.rmtree, pool._folder)
            return pool

        yield make


def test_a_pool_that_ends_removes_its_own_file_and_no_others(make_pool, tmp_path):
    first, second = make_pool(), make_pool()
    file = tmp_path / "pool"
    first._announce()
    second._announce()
    first._withdraw()
    ports = [listener.getsockname()[1] for listener in second._listeners]
    assert json.loads(file.read_text())["ports"] == ports
    second._withdraw()
    assert not file.exists()
    second._withdraw()
    file.write_text("of something else")
    second._withdraw()
    assert file.exists()
