"""Several engines that serve the same model, each by itself, and a router in front of them (docs/parallel.md).

`pagedkv.replicas.ray` starts them as Ray actors; it is imported by itself, because it needs the extra `ray`.
"""

from .replica import EngineReplica, Replica, ReplicaDied
from .router import Router

__all__ = ["EngineReplica", "Replica", "ReplicaDied", "Router"]
