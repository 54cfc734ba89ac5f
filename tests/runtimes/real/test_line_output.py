"""Several workers write to one place: what one prints at once comes out in one piece."""

import io

from paceline.runtimes.processes import write_whole_lines


class File(io.RawIOBase):
    """Each write of the process, as other processes could come between."""

    def __init__(self):
        self.writes = []

    def writable(self):
        return True

    def write(self, piece):
        self.writes.append(bytes(piece))
        return len(piece)


def unbuffered(file):
    """What Python makes of standard output under PYTHONUNBUFFERED."""
    return io.TextIOWrapper(file, write_through=True)


def test_a_line_is_one_write():
    file = File()
    stream = unbuffered(file)
    write_whole_lines([stream])
    print("two", "words", file=stream)
    assert file.writes == [b"two words\n"]
    print("no end", end="", file=stream, flush=True)
    assert file.writes[1:] == [b"no end"]


def test_control_python_alone_writes_word_by_word():
    file = File()
    print("two", "words", file=unbuffered(file))
    assert file.writes == [b"two", b" ", b"words", b"\n"]


def test_what_is_buffered_stays_so():
    file = File()
    stream = io.TextIOWrapper(io.BufferedWriter(file))
    write_whole_lines([stream, object()])
    print("two", "words", file=stream)
    assert not file.writes
    stream.flush()
    assert file.writes == [b"two words\n"]
