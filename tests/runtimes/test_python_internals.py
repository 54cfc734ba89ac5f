"""What a thread executes, as another thread sees it."""

import threading

from paceline.runtimes.python_internals import file_of, frames_of


def test_a_threads_calls_are_seen_from_another_innermost_first():
    is_there, may_go = threading.Event(), threading.Event()
    text = "def größe(n):\n    größe(n - 1) if n else wait()\ngröße(2)"

    def wait():
        is_there.set()
        may_go.wait()

    def run():
        exec(compile(text, "/where/größe.py", "exec"), {"wait": wait})

    thread = threading.Thread(target=run)
    thread.start()
    is_there.wait()
    seen = frames_of(thread.ident)
    may_go.set()
    thread.join()

    where = [(frame.function, frame.line) for frame in seen if "größe" in frame.file]
    assert where == [("größe", 2)] * 3 + [("<module>", 3)]
    functions = [frame.function for frame in seen]
    assert functions.index("wait") < functions.index("größe") < functions.index("run")
    assert seen[0].file == file_of("threading")


def test_a_thread_that_is_over_executes_nothing():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert frames_of(thread.ident) == []
