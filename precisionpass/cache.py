"""What keeps a compiled artifact from being reused after a rule, an op or a kernel has changed.

Inductor and AOTAutograd trace the backward of a custom op into their artifacts, whose key knows nothing of the op's
source. A pass that does nothing, but whose identity is a digest of everything that decides results, joins the key.

Private torch API used here: `torch._inductor.custom_graph_pass.CustomGraphPass` and the config name
`post_grad_custom_pre_pass`. `tests/test_cache.py` shows that a change is noticed and that no change is a hit.
"""

import functools
import hashlib
from importlib.resources import files
from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

PASS_OPTION = "post_grad_custom_pre_pass"


class IdentityPass(CustomGraphPass):
    """Changes nothing; `uuid` is the digest. A pass that the user had set runs as before and joins the key."""

    def __init__(self, digest: str, users_own=None):
        self.digest, self.users_own = digest, users_own

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.users_own is not None:
            self.users_own(graph)

    def uuid(self):
        own = self.users_own.uuid() if hasattr(self.users_own, "uuid") else None
        return (self.digest, own)


def key(rules_digest: str) -> str:
    """Digest of the rules, every source file of the package, the torch version and the device's capability."""
    device = str(torch.cuda.get_device_capability()) if torch.cuda.is_available() else "cpu"
    text = "\n".join((rules_digest, source_digest(), torch.__version__, device))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """SHA-256 in hex over the package's Python sources, by path."""
    root = Path(str(files("precisionpass")))
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
