"""The code that a configuration names, and what it imports, is found without running it."""

import importlib.metadata

import pytest

from seeupo_jax.cli.user_sources import code_digests, named_code

NEVER = "raise RuntimeError('it was run')\n"
FILES = {
    "desk.py": "import helper\nfrom kit import tools\nfrom kit.deep.more import x\n"
    "import numpy, json\n",
    "helper.py": "def f():\n    import late\n",
    "late.py": "from seeupo_jax import envs\n",
    "kit/__init__.py": "from . import base\n",
    "kit/base.py": "",
    "kit/tools.py": "from .deep import y\nfrom . import sibling\nfrom ..far import z\n",
    "kit/sibling.py": "",
    "kit/deep/__init__.py": "",
    "kit/deep/more.py": "from ..other import *\n",
    "kit/other.py": "",
    "kit/unused.py": "",
    "alone.py": "",
}
OF_DESK = {
    *("desk", "helper", "late", "kit", "kit.base", "kit.tools", "kit.sibling"),
    *("kit.deep", "kit.deep.more", "kit.other"),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + NEVER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_module_is_followed_through_all_that_it_imports(place):
    found = code_digests("desk")
    numpy = f"version of numpy: {importlib.metadata.version('numpy')}"
    assert {f"code of {name}" for name in OF_DESK} | {"version of numpy"} == {*found}
    assert f"version of numpy: {found['version of numpy']}" == numpy
    assert next(iter(found)) == "code of desk"  # the first that a difference names


@pytest.mark.parametrize("name", sorted(OF_DESK))
def test_a_change_of_any_of_them_changes_its_digest_alone(place, name):
    before = code_digests("desk")
    file = place / f"{name.replace('.', '/')}.py"
    file = file if file.exists() else place / name.replace(".", "/") / "__init__.py"
    file.write_text(file.read_text() + "# more\n")
    after = code_digests("desk")
    assert {key for key in before if before[key] != after[key]} == {f"code of {name}"}


def test_a_file_finds_modules_beside_it_and_is_named_without_its_folder(place, monkeypatch):
    monkeypatch.chdir(place.parent)
    found = code_digests(f"{place.name}/desk.py")
    assert {"code of desk.py", "code of helper", "code of kit.tools"} <= {*found}
    assert found == code_digests(str(place / "desk.py"))


def test_a_package_that_is_installed_is_followed_and_those_that_it_imports_by_version(tmp_path):
    packages = tmp_path / "site-packages"
    for name, text in {
        "mine/__init__.py": "import mine.env\nimport theirs\n",
        "mine/env.py": "",
        "theirs/__init__.py": "",
    }.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text)
    info = packages / "theirs-3.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 3.5\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(packages))
        found = code_digests("mine.env")
    assert {*found} == {"code of mine", "code of mine.env", "version of theirs"}
    assert found["version of theirs"] == "3.5"


def test_what_is_not_there_or_cannot_be_read_has_no_digest(place):
    assert code_digests("nowhere.at.all") == {"code of nowhere.at.all": None}
    assert code_digests("gone.py") == {"code of gone.py": None}
    (place / "desk.py").write_text("def (:\n")
    assert {*code_digests("desk")} == {"code of desk"}  # importing it says what is wrong
    assert code_digests("os") == {"code of os": None}


@pytest.mark.parametrize(
    "text, code",
    [
        ("my.envs:Desk", "my.envs"),
        ("folder/my file.py:Desk", "folder/my file.py"),
        ("desk:Desk.make", "desk"),
        ("http://localhost:80", None),
        ("a text: more", None),
        ("order_desk", None),
    ],
)
def test_values_that_name_code(text, code):
    assert named_code(text) == code
