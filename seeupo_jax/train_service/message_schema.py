"""Tinker's protocol buffers as classes of Google's library, with the fields that are used here.

Names and numbers are those of `tinker_public.proto` in the package `tinker` 0.38.0; a field that is
not here is skipped. Types that are enumerations there are int32 here, which has the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "seeupo_jax.tinker"
_SCHEMA: Mapping[str, tuple[str, ...]] = {
    "ForwardBackwardRequest": (
        "string model_id = 1",
        "int32 seq_id = 2",
        "repeated Datum data = 3",
        "string loss_fn = 4",
        "map double loss_fn_config = 5",
        "bool forward_only = 6",
        "map LossConfigValue loss_fn_config_v2 = 7",
    ),
    "LossConfigValue": ("double number = 1", "string text = 2"),
    "Datum": ("repeated Chunk model_input = 1", "map Tensor loss_fn_inputs = 2"),
    "Chunk": ("EncodedTextChunk encoded_text = 1",),
    "EncodedTextChunk": ("bytes tokens = 1",),
    "Tensor": (
        "bytes dense = 1",
        "SparseCsr sparse_csr = 2",
        "int32 dtype = 3",
        "repeated int64 shape = 4",
    ),
    "SparseCsr": (),
    "ForwardBackwardOutput": (
        "string loss_fn_output_type = 1",
        "repeated ArrayRecord loss_fn_outputs = 2",
        "map double metrics = 3",
    ),
    "ArrayRecord": (
        "string type_tag = 1",
        "map BatchedTensor fields = 2",
        "int64 num_datums = 3",
    ),
    "BatchedTensor": ("bytes data = 1", "bytes offsets = 2", "int32 dtype = 3"),
    "SampleResponse": (
        "repeated SampledSequence sequences = 1",
        "bytes prompt_logprobs = 2",
        "TopkLogprobs topk_prompt_logprobs = 3",
        "int32 prompt_cache_hit_tokens = 4",
    ),
    "SampledSequence": (
        "int32 stop_reason = 1",
        "bytes tokens = 2",
        "bytes logprobs = 3",
        "TopkLogprobs topk_sampled_logprobs = 4",
    ),
    "TopkLogprobs": (
        "bytes token_ids = 1",
        "bytes logprobs = 2",
        "uint32 k = 3",
        "uint32 length = 4",
    ),
}


def _add_field(message: descriptor_pb2.DescriptorProto, line: str) -> None:
    """Adds a field, written as in a `.proto` file; the keys of a map are strings."""
    *label, kind, name, _, number = line.split()
    repeated = label != []
    if label == ["map"]:
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, "string key = 1")
        _add_field(entry, f"{kind} value = 2")
        kind = f"{message.name}.{entry.name}"
    field = message.field.add(name=name, number=int(number))
    field.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    if kind.islower() or kind[-1].isdecimal():
        field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


def _make_classes() -> Mapping[str, Any]:
    # Of this edition, a field that is absent differs from one that is 0, and text is UTF-8.
    file = descriptor_pb2.FileDescriptorProto(
        name="tinker.proto",
        package=_PACKAGE,
        syntax="editions",
        edition=descriptor_pb2.EDITION_2023,
    )
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for line in fields:
            _add_field(message, line)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _SCHEMA}
    return {name: message_factory.GetMessageClass(found[name]) for name in found}


_CLASSES = _make_classes()
ForwardBackwardRequest = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput = _CLASSES["ForwardBackwardOutput"]
SampleResponse = _CLASSES["SampleResponse"]
