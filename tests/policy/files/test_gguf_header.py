"""The header of a GGUF file: whatever is damaged, the file and the damage are named."""

import pytest
from gguf_cases import write_llama

from seeupo_jax.policy.files.gguf import GgufFile


def test_a_file_of_another_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no file .*absent.gguf; allowed: a GGUF file"):
        GgufFile(tmp_path / "absent.gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ValueError, match="m.gguf is not a GGUF file; allowed: .*begins with GGUF"):
        GgufFile(path)
    path.write_bytes(b"GGUF" + bytes([0, 0, 0, 3]) + bytes(100))
    with pytest.raises(ValueError, match=r"m.gguf is GGUF version 50331648; allowed: \(2, 3\)"):
        GgufFile(path)


def test_a_file_cut_anywhere_says_so(tmp_path):
    path = write_llama(tmp_path)
    content = path.read_bytes()
    start = content.index(b"output_norm.weight")  # which is in the header
    for size in [*range(4, start, 97), start]:
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=f"truncated: {size} bytes do not hold its header"):
            GgufFile(path)
    path.write_bytes(content[:-100])
    last = "blk.1.ffn_down.weight"
    with pytest.raises(ValueError, match=f"llama.gguf is truncated: {last} ends at byte"):
        GgufFile(path)


def test_damage_in_the_header_is_told(tmp_path):
    path = write_llama(tmp_path, fields={"note": "text"})
    content = path.read_bytes()
    name = b"output_norm.weight"
    kind = content.index(name) + len(name) + 4 + 8
    for place, value, reason in (
        (kind, 77, "output_norm.weight is of type 77; allowed: F32, F16, .*Q4_1"),
        (content.index(b"note") + 4, 77, "damaged: its header has a value of type 77"),
        (content.index(b"text"), 0xFF, "damaged: its header is no text"),
    ):
        path.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
        with pytest.raises(ValueError, match=f"llama.gguf.*{reason}"):
            GgufFile(path)
    with pytest.raises(ValueError, match="general.alignment is 0; allowed: a number >= 1"):
        GgufFile(write_llama(tmp_path, fields={"general.alignment": 0}))
