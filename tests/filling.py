"""A disk that takes a part of what is written to it."""

import os


def write_a_part(monkeypatch, size):
    """A disk that takes `size` bytes more and no others; to be undone by monkeypatch."""
    write, room = os.write, [size]

    def limited(file, data):
        part = bytes(data)[: room[0]]
        room[0] -= len(part)
        if not part:
            raise OSError(28, "No space left on device")
        return write(file, part)

    monkeypatch.setattr(os, "write", limited)
