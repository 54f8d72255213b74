"""Write the inputs that fuzzing begins with, most of them files by a library: `python make_seeds.py FOLDER`."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.security import hostile


def states():
    base = torch.arange(6.0).reshape(2, 3)
    yield {"w": base, "t": base.t(), "h": base[:, ::2], "e": torch.ones(1).expand(2, 2), "s": torch.tensor(1.5)}
    yield {"half": base.half(), "bf16": base.bfloat16(), "fp8": base.to(torch.float8_e4m3fn), "n": torch.empty(0, 2)}
    yield {"i": torch.arange(3), "b": torch.tensor([True]), "c": torch.ones(2, dtype=torch.complex64)}
    yield {"u": torch.ones(2, dtype=torch.uint16), "p": torch.nn.Parameter(base), "list": [1, 2.5, "x", None, (True,)]}
    model = torch.nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    yield {"model": model.state_dict(), "optimizer": adam.state_dict(), "step": 3}
    yield {"model": model}


def seeds():
    for state in states():
        for protocol in (2, 4):
            whole = hostile.saved(state, pickle_protocol=protocol)
            yield 0, whole
            with zipfile.ZipFile(io.BytesIO(whole)) as archive:
                yield 1, archive.read("archive/data.pkl")
            yield 2, hostile.saved(state, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
        tensors = {k: v.contiguous().clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
        content = save(tensors)
        yield 4, content
        yield 5, content[8 : 8 + int.from_bytes(content[:8], "little")]
    yield 1, hostile.whole(hostile.table({"w": hostile.ONES}))
    yield (
        3,
        hostile.whole(hostile.table({"w": hostile.ONES}))
        + hostile.whole(hostile.values(hostile.text("0")))
        + ((2).to_bytes(8, "little") + hostile.ONES_BYTES),
    )
    distributed = hostile.distributed()
    yield 6, distributed[".metadata"]
    yield 7, distributed[hostile.FIRST_SHARD]
    for path in sorted((Path(__file__).parents[3] / "fixtures" / "logs" / "tensorboard").glob("events.*")):
        content = path.read_bytes()
        yield 8, content[:2000]
        at = 0
        while at + 12 <= 2000:
            length = int.from_bytes(content[at : at + 8], "little")
            yield 9, content[at + 12 : at + 12 + length]
            at += 16 + length
    yield 5, b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, (parser, content) in enumerate(seeds()):
        (folder / f"{number:03d}").write_bytes(bytes([parser]) + content)
