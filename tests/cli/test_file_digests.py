"""Files that differ have other digests, also large ones of which only samples are read."""

import os

import pytest

from seeupo_jax.cli.file_digests import file_digest, model_digests, text_digest

MIB = 2**20
SIZE = 100 * MIB + 12_345


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A sparse file of 100 MiB, whose blocks all differ."""
    file = tmp_path_factory.mktemp("large") / "model.safetensors"
    with file.open("wb") as opened:
        for number in range(0, SIZE, MIB):
            opened.seek(number)
            opened.write(number.to_bytes(8, "little"))
        opened.truncate(SIZE)
    return file


def with_byte(file, place):
    """The digest where one byte is another, which is put back."""
    with file.open("r+b") as opened:
        opened.seek(place)
        was = opened.read(1)
        opened.seek(place)
        opened.write(bytes([was[0] ^ 1]))
    changed = file_digest(file)
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(was)
    return changed


def test_a_large_file_is_told_by_its_ends_its_size_and_a_sample_of_every_4_mib(large):
    digest = file_digest(large)
    sampled = [0, MIB - 1, SIZE - MIB, SIZE - 1, *(n * 4 * MIB + 16_383 for n in range(1, 25))]
    assert all(with_byte(large, place) != digest for place in sampled)
    assert (
        with_byte(large, 2 * MIB) == digest == file_digest(large)
    )  # as the page says: it is missed
    os.truncate(large, SIZE - 1)
    assert file_digest(large) != digest
    os.truncate(large, SIZE)
    assert file_digest(large) == digest


def test_a_change_of_4_mib_in_a_row_is_found_wherever_it_is(large):
    digest = file_digest(large)
    content = large.read_bytes()
    for start in range(MIB, SIZE - 5 * MIB, 7 * MIB + 1):
        with large.open("r+b") as opened:
            opened.seek(start)
            opened.write(b"x" * (4 * MIB))
        assert file_digest(large) != digest
        large.write_bytes(content)


def test_a_small_file_is_told_by_every_byte(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b"x" * 5000)
    digest = file_digest(file)
    assert all(with_byte(file, place) != digest for place in (0, 2500, 4999))
    assert file_digest(tmp_path / "none") is None
    assert text_digest(b"a") != text_digest(b"b")


def test_of_a_models_folder_what_is_read_is_compared(tmp_path):
    names = ("config.json", "tokenizer.json", "chat.json", "chat_template.jinja", "merges.txt")
    unread = ("README.md", ".gitattributes", ".cache.json", "train.log")
    for name in (*names, *unread, "model-00001.safetensors"):
        (tmp_path / name).write_text(name)
    (tmp_path / "original").mkdir()
    assert {*model_digests(str(tmp_path))} == {*names, "model-00001.safetensors"}
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert {*model_digests(str(tmp_path / "x.gguf"))} == {"x.gguf"}
    parts = {f"m-{number:05}-of-00002.gguf" for number in (1, 2)}
    for name in parts:
        (tmp_path / name).write_bytes(b"GGUF")
    assert {*model_digests(str(tmp_path / min(parts)))} == parts
    assert {*model_digests(str(tmp_path / max(parts)))} == {max(parts)}
    assert model_digests(str(tmp_path / "none")) == {}
    assert "model.safetensors" in model_digests("package:order_desk")
