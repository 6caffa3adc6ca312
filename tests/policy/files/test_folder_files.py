"""A model folder whose files lack their content is one sentence that says which and why."""

import json
import shutil

import chat_cases as cases
import pytest
from flax import nnx
from refusals import refusal
from safetensors.numpy import load_file, save_file

from seeupo_jax.configuration import schema
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.architecture import Architecture, LoraAdapters
from seeupo_jax.policy.lora import attach_adapters, save_adapters
from seeupo_jax.policy.transformer import Transformer

# The three lines that `git clone` leaves without `git lfs`; specification, version 1.
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
FILES = (
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "generation_config.json", "chat.json", "special_tokens_map.json"),
    *("adapter_config.json", "adapter_model.safetensors"),
)
WHY = {
    POINTER: "a pointer of Git LFS, not the file itself; allowed: .*git lfs pull",
    "": "empty",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model with a tokenizer and its adapters."""
    folder = tmp_path_factory.mktemp("whole")
    library = cases.small_library()
    model = Transformer(Architecture(len(library), 16, 1, 2, 2, 8, 16), nnx.Rngs(0))
    save_pretrained(model, folder / "model")
    library.save_pretrained(folder / "model")
    save_adapters(
        attach_adapters(model, LoraAdapters(1, 1.0, ("q_proj",))),
        folder / "adapters",
        folder / "model",
    )
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    shutil.copytree(whole / "model", tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("content", WHY, ids=["pointer", "empty"])
@pytest.mark.parametrize("name", FILES)
def test_a_pointer_of_git_lfs_or_an_empty_file_is_named(whole, tmp_path, name, content):
    source = "adapters" if name.startswith("adapter") else "model"
    shutil.copytree(whole / source, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path / name} is .*{WHY[content]}"):
        from_pretrained(tmp_path)
    refusal(lambda: from_pretrained(tmp_path))


@pytest.mark.parametrize("content", [POINTER, ""])
def test_so_are_a_part_of_a_model_its_index_a_gguf_file_and_a_template(folder, content):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    part, index = (
        folder / f"model{end}" for end in ("-1-of-1.safetensors", ".safetensors.index.json")
    )
    places = json.dumps({"weight_map": dict.fromkeys(tensors, part.name)})
    save_file(tensors, part)
    index.write_text(places)
    from_pretrained(folder)
    part.write_text(content)
    assert str(part) in refusal(lambda: from_pretrained(folder))
    index.write_text(content)
    assert str(index) in refusal(lambda: from_pretrained(folder))
    gguf, template = folder / "model.gguf", folder / "chat.jinja"
    for file in (gguf, template):
        file.write_text(content)
    assert str(gguf) in refusal(lambda: from_pretrained(gguf))
    chat = schema.Chat(template=str(template))
    assert str(template) in refusal(lambda: from_pretrained(folder, chat=chat))


@pytest.mark.parametrize("placed", [None, [1], {"a": 5}])
def test_an_index_of_another_kind_is_one_sentence(folder, placed):
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    text = refusal(lambda: from_pretrained(folder))
    assert text == f"{index}: weight_map is {placed}; allowed: the file of each tensor, by name."


def test_a_folder_without_a_vocabulary_says_what_was_looked_for_and_what_is_there(folder):
    (folder / "tokenizer.json").unlink()
    text = refusal(lambda: from_pretrained(folder))
    assert text.startswith(f"tokenizer: {folder} has no tokenizer.json and no tokenizer.model")
    assert text.endswith(
        "it has chat_template.jinja, config.json, model.safetensors, tokenizer_config.json."
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    "change", [lambda text: text[: len(text) // 2], lambda text: "[1]", lambda text: "\ufffd"]
)
def test_a_truncated_or_another_file_is_one_sentence(folder, name, change):
    file = folder / name
    file.write_text(change(file.read_text()))
    assert str(folder) in refusal(lambda: from_pretrained(folder))
