"""Settings of a job: one frozen dataclass, read from the command line, checked when made.

Each field is a flag. Groups of flags give the fields, `parse` the rest:

    @dataclass(frozen=True)
    class Settings(Classic):
        allreduce: str = flag("auto", "algorithm", choices=("auto", "ring"))

    settings = parse(Settings, argv, "What the job does.")
"""

from lockstep.settings.classic import Classic
from lockstep.settings.cluster import Cluster
from lockstep.settings.flags import Checked, flag, parse
from lockstep.settings.numerics import Numerics
from lockstep.settings.optimization import Optimization
from lockstep.settings.pictures import Pictures
from lockstep.settings.saving import Saving

__all__ = [
    "Checked",
    "Classic",
    "Cluster",
    "Numerics",
    "Optimization",
    "Pictures",
    "Saving",
    "flag",
    "parse",
]
