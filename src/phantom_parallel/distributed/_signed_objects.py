"""Object collectives whose messages are signed with a secret of the launch.

Object collectives of torch unpickle what arrives, and gloo accepts connections from any process that can reach it: on
loopback, from every user of the machine. With a signature, nothing is unpickled that our own ranks have not sent.
"""

import hmac
import io
import pickle
from typing import Any

import torch.distributed as dist

_DIGEST = "sha256"
_DIGEST_BYTES = 32


def sign_objects(key: bytes) -> None:
    """Sign and verify the messages of all object collectives of this process from now on, those within torch included.

    Args:
        key: The same on all ranks, and known to nobody else.
    """
    c10d: Any = dist.distributed_c10d
    for name in ("_pickler", "_unpickler"):  # torch's own places for other picklers
        if not hasattr(c10d, name):
            raise RuntimeError(f"torch.distributed has no {name}, so its object collectives cannot be signed")

    class SignedPickler:
        """Writes the signature of a pickle, then the pickle."""

        def __init__(self, file: io.BytesIO) -> None:
            self._file = file

        def dump(self, value: object) -> None:
            message = pickle.dumps(value)
            self._file.write(hmac.digest(key, message, _DIGEST))
            self._file.write(message)

    class SignedUnpickler:
        """Reads what `SignedPickler` wrote, if the signature is right."""

        def __init__(self, file: io.BytesIO) -> None:
            self._file = file

        def load(self) -> Any:
            signature, message = self._file.read(_DIGEST_BYTES), self._file.read()
            if not hmac.compare_digest(signature, hmac.digest(key, message, _DIGEST)):
                raise RuntimeError(
                    "an object was received that no rank of this launch has sent, and was not unpickled: another "
                    "process may have connected to this rank"
                )
            return pickle.loads(message)

    c10d._pickler, c10d._unpickler = SignedPickler, SignedUnpickler
