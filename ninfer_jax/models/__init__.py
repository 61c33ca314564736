"""Models as people name them: what a name means, what is fetched for it, and what is kept of it on this machine.

Nothing in here starts JAX or reads a tensor. `names` tells directories, files, presets and Hub ids apart, `places` finds what they
name, `hub` fetches what is needed of a repository into the Hub's own cache, `kept` has the directory of converted checkpoints.
"""

from ninfer_jax.models.hub import Tell
from ninfer_jax.models.kept import Say
from ninfer_jax.models.names import HubName, Preset, printed, read_name, short_name
from ninfer_jax.models.places import Found, checked, for_shapes, shapes_in, source_of

__all__ = [
    "Found",
    "HubName",
    "Preset",
    "Say",
    "Tell",
    "checked",
    "for_shapes",
    "printed",
    "read_name",
    "shapes_in",
    "short_name",
    "source_of",
]
