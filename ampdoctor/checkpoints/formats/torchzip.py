"""The zip format of `torch.save`: the inert machine reads the structure, and the data are read by position.

torch's reader is not used. It computes the positions of records from the order in which `torch.save` writes instead of
looking them up (seen in 2.13), so in a zip that another tool wrote again one tensor gets another's bytes. With
`mmap=True` it reads a neighbour's bytes if a record is shorter than the pickle claims, and garbage if one is
compressed. Its restricted unpickler refuses files with plain weights because of one foreign object beside them.
"""

from __future__ import annotations

from ampdoctor.checkpoints.formats.zip_records import read_records
from ampdoctor.checkpoints.pickles.inert_pickle import InertMachine
from ampdoctor.checkpoints.pickles.rebuild import TensorBuilder
from ampdoctor.checkpoints.pickles.tree import Saved, require_finite_tree
from ampdoctor.checkpoints.storage.files import ByteSource


def read_torch_zip(file: ByteSource, ahead: ByteSource | None = None) -> Saved:
    """Returns the saved object, with a `StoredTensor` for each strided tensor; no tensor data are read.

    Args:
        file: The zip, from which the tensors' bytes will be read.
        ahead: A source of the same bytes from which the structure is read faster.

    Raises:
        CheckpointError: The zip is corrupted, ambiguous, or not written by `torch.save`.
        LimitExceededError: A part is larger than a checkpoint needs.
    """
    records = read_records(ahead or file)
    machine = InertMachine(records.pickle, file.name, TensorBuilder(file, records.storages))
    tree, _ = machine.run()
    require_finite_tree(tree, file.name)
    return Saved(tree, tuple(machine.foreign))
