"""A fleet on Ray Serve: one engine a card, on as many machines as the cluster has, behind one door.

Ray is imported by functions, so that this module tells what is wrong where Ray is not installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ninfer_jax.fleet.affinity import Affinity
from ninfer_jax.fleet.call import Call, Head
from ninfer_jax.fleet.front import Lost, build_front
from ninfer_jax.fleet.replica import Load, Replica
from ninfer_jax.fleet.reports import Report
from ninfer_jax.server import Settings

if TYPE_CHECKING:
    from ray.serve import Application

APP, ENGINES = "ninfer-jax", "engines"
_STORE = 80 << 20  # bytes of Ray's object store: requests and pieces of answers are small
_REPORT_SECONDS = 1.0
_MORE = 16  # requests beyond slots and queue that reach an engine, which then refuses them in its own words


@dataclass(frozen=True)
class Fleet:
    """least, most: replicas; equal for a fixed number. slots, queue: of each. card: whether each has one; cores: of one without."""

    least: int
    most: int
    slots: int = 1
    queue: int = 64
    card: bool = False
    cores: float = 1.0


def replicas_of(text: str) -> tuple[int, int] | None:
    """(least, most) of `--replicas`; None for `auto`, one a card. ValueError."""
    if text == "auto":
        return None
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(f"--replicas is {text!r}, it must be a number, a range like 1-4, or auto (one a card)")
    return least, most


def planned(wanted: tuple[int, int] | None, cards: int, cores: int, slots: int, queue: int) -> Fleet:
    """The fleet for a cluster of so many cards and cores; ValueError where it has too few. Without a card engines run on CPUs."""
    least, most = wanted or (max(1, cards), max(1, cards))
    have, what = (cards, "cards") if cards else (cores, "cores and no card")
    if most > have:
        raise ValueError(f"--replicas asks for {most}, this cluster has {have} {what}: an engine needs one of its own")
    return Fleet(least, most, slots, queue, bool(cards), cores / most if not cards else 1.0)


def application(settings: Settings, load: Load, fleet: Fleet, environment: dict[str, str] | None = None) -> Application:
    """The Serve application. load: (service, name of the replica) -> its engine; it must be importable on every machine.
    environment: variables of the engines' processes."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    runtime: dict[str, Any] = {"env_vars": {"RAY_USAGE_STATS_ENABLED": "0", **(environment or {})}}
    options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if fleet.card else {"num_cpus": fleet.cores}
    if fleet.least == fleet.most:
        size: dict[str, Any] = {"num_replicas": fleet.most}
    else:
        # One waits beside those in slots, on average: from then on another engine is worth its card.
        scaling = {"min_replicas": fleet.least, "max_replicas": fleet.most, "target_ongoing_requests": fleet.slots + 1}
        size = {"autoscaling_config": scaling}
    engines = serve.deployment(
        name=ENGINES,
        ray_actor_options=options | {"runtime_env": runtime},
        max_ongoing_requests=fleet.slots + fleet.queue + _MORE,
        # Answers may run for as long as after SIGTERM; then the cache is saved.
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=settings.drain_seconds + 60,
        health_check_period_s=2,
        max_constructor_retry_count=2,
        request_router_config=RequestRouterConfig(
            request_router_class="ninfer_jax.fleet.router.Router", request_routing_stats_period_s=_REPORT_SECONDS
        ),
        **size,
    )(ServedReplica)
    doors = serve.deployment(name="front", ray_actor_options={"num_cpus": 0, "runtime_env": runtime}, max_ongoing_requests=2000)
    return doors(_front_class()).bind(settings, engines.bind(settings, load))


class ServedReplica:
    """`Replica` as Serve calls it: it is ready when its constructor returns."""

    def __init__(self, settings: Settings, load: Load):
        from ray import serve

        rank = serve.get_replica_context().rank
        self._replica = Replica(settings, load, str(getattr(rank, "rank", rank)))

    async def answer(self, call: Call, affinity: Affinity) -> AsyncGenerator[Head | bytes, None]:
        """The answer to one request."""
        async for part in self._replica.answer(call, affinity):
            yield part

    async def report(self) -> Report:
        """Metrics and status."""
        return await self._replica.report()

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers go by."""
        return self._replica.routing()

    async def __del__(self) -> None:
        await self._replica.close()


def _front_class() -> type:
    from ray import serve

    class Front:
        """The door. It has no state that another would need."""

        def __init__(self, settings: Settings, engines: Any):
            self._settings, self._engines = settings, engines

        def __serve_build_asgi_app__(self) -> Any:
            return build_front(self._settings, HandleEngines(self._engines))

    return serve.ingress()(Front)


class HandleEngines:
    """The replicas behind a deployment's handle."""

    def __init__(self, handle: Any):
        self._handle = handle
        self._stream = handle.options(method_name="answer", stream=True)

    async def send(self, call: Call, affinity: Affinity) -> AsyncGenerator[Head | bytes, None]:
        """The answer; Lost if its replica dies."""
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

        answer = self._stream.remote(call, affinity)
        done = False
        try:
            async for part in answer:
                yield part
            done = True
        except (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError) as error:
            done = True
            raise Lost(type(error).__name__) from None
        finally:
            if not done:
                answer.cancel()

    async def reports(self) -> list[Report]:
        """Those of all replicas that answer."""
        found = await self._handle.broadcast("report").results_async(return_exceptions=True)
        return sorted((one for one in found if isinstance(one, Report)), key=lambda report: report.name)


def run(
    settings: Settings,
    load: Load,
    place: tuple[str, int],
    wanted: tuple[int, int] | None,
    shape: tuple[int, int],
    say: Callable[[str], None],
    address: str | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. shape: slots and queue of each engine. address: of a running Ray cluster; None starts one on
    this machine, which nobody else reaches. ValueError for more replicas than it can have."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"--replicas needs the extra `ray` ({error.name} is missing): pip install 'ninfer-jax[ray]'") from None
    stop, ready = threading.Event(), False

    def ended(number: int, frame: Any) -> None:
        stop.set()
        if not ready:
            raise _Stopped

    # The command line's own watch over interrupts would end this process before answers are finished.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ended)
    try:
        start(address)
        have = ray.cluster_resources()
        fleet = planned(wanted, int(have.get("GPU", 0)), int(have.get("CPU", 1)), *shape)
        environment = {} if fleet.card else {"JAX_PLATFORMS": "cpu"}
        say(f"starting {fleet.most} replicas, {'a card each' if fleet.card else f'{fleet.cores:g} cores each'}")
        serve.start(proxy_location="HeadOnly", http_options={"host": place[0], "port": place[1], "keep_alive_timeout_s": 75})
        _deploy(application(settings, load, fleet, environment))
        ready = True
        say(f"ready on http://{place[0]}:{place[1]}")
        stop.wait()
        say("stopping; running answers are finished")
    except _Stopped:
        pass
    finally:
        with contextlib.suppress(Exception):  # what is left of a cluster that is going down
            serve.shutdown()
        ray.shutdown()
    say("stopped")


class _Stopped(BaseException):
    """A signal before the fleet was ready."""


def _deploy(app: Application) -> None:
    """Runs the application until its replicas are ready; ValueError, one line, for what keeps an engine from loading."""
    from ray import serve

    try:
        serve.run(app, name=APP, route_prefix="/")
    except RuntimeError as error:
        said = str(error)
        with contextlib.suppress(Exception):
            status = serve.status().applications[APP]
            said = "\n".join([said, status.message, *(one.message for one in status.deployments.values())])
        causes = re.findall(r"^\s*(?:[\w.]*\b(?:ValueError|FileError|OSError|MemoryError)): (.+)$", said, re.MULTILINE)
        if not causes:
            raise
        raise ValueError(f"a replica could not be loaded: {causes[-1]}") from None


def start(address: str | None, cores: int | None = None) -> None:
    """Ray: the cluster at `address`, or one of this machine alone, without a dashboard."""
    import ray

    if address is not None:
        ray.init(address=address, log_to_driver=False)
        return
    ray.init(num_cpus=cores, include_dashboard=False, object_store_memory=_STORE, log_to_driver=False, _node_ip_address="127.0.0.1")
