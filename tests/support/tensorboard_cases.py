"""What TensorBoard's files hold, read without TensorBoard."""

import struct


def events_of(workdir):
    """TFRecords read by hand: length, its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return events
