"""What lies in the files of TensorBoard, read by their format and not by the package that wrote them."""

import struct


def read_events(folder):
    """Events of all files in a folder, oldest first: length, its checksum, the message, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + size]))
            at += 16 + size
        assert at == len(data)
    return events


def scalars(folder):
    return [
        (e.step, v.tag, v.simple_value)
        for e in read_events(folder)
        for v in e.summary.value
        if not v.HasField("tensor")
    ]


def texts(folder):
    values = [v for e in read_events(folder) for v in e.summary.value if v.HasField("tensor")]
    return {v.tag.removesuffix("/text_summary"): v.tensor.string_val[0].decode() for v in values}
