"""The smoke test: checks of a cluster, one a file, run so that it cannot hang.

`check` says what a check is; `conduct` runs them; `report`, `table` and `page` show what they have
found. A check has a question, a verdict and, unless all is well, a cure that can be typed.
"""

from lockstep.smoke.check import Check, Options
from lockstep.smoke.conduct import conduct
from lockstep.smoke.cpus import Cpus
from lockstep.smoke.data import Data
from lockstep.smoke.gpus import Gpus
from lockstep.smoke.groups import Groups
from lockstep.smoke.launch import Launch
from lockstep.smoke.memory import Memory
from lockstep.smoke.network import Network
from lockstep.smoke.place import fresh_directory, kept_directory
from lockstep.smoke.report import Report
from lockstep.smoke.shared_path import SharedPath
from lockstep.smoke.software import Software
from lockstep.smoke.speed import Speed

__all__ = [
    "Check",
    "Cpus",
    "Data",
    "Gpus",
    "Groups",
    "Launch",
    "Memory",
    "Network",
    "Options",
    "Report",
    "SharedPath",
    "Software",
    "Speed",
    "conduct",
    "fresh_directory",
    "kept_directory",
]
