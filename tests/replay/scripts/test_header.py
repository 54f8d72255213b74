"""What drawing from a loop's header may move is what the header names, and not all that its names hold."""

from __future__ import annotations

from types import SimpleNamespace

from ampdoctor.replay.scripts.loop_hooks import read_by

LOADER, OTHER = [1, 2], SimpleNamespace(count=3)


class Trainer:
    def __init__(self):
        self.epochs, self.loader, self.inner = 3, [1, 2, 3], SimpleNamespace(start=1)

    @property
    def steps(self):
        raise AssertionError("a header is not evaluated")

    def draw(self):
        return iter(self.loader)

    def headers(self):
        skipped = 2
        return {
            "a number": lambda: range(self.epochs),
            "a number, further in": lambda: range(skipped, self.inner.start),
            "a loader": lambda: enumerate(self.loader),
            "a method": lambda: enumerate(self.draw()),
            "a property": lambda: range(self.steps),
            "globals": lambda: zip(LOADER, range(OTHER.count), strict=False),
            "a generator": lambda: (x + skipped for x in self.loader),
        }


def test_a_header_reads_what_it_names():
    trainer = Trainer()
    headers = trainer.headers()
    read = {name: read_by(items) for name, items in headers.items()}
    assert read == {
        "a number": (3,),
        "a number, further in": (2, 1),
        "a loader": (trainer.loader,),
        "a method": (trainer,),
        "a property": (trainer,),
        "globals": (LOADER, 3),
        "a generator": (headers["a generator"],),
    }
    assert read_by(None) == ()
