"""The facts about this machine that serving depends on. Changes nothing, uses no network; ``checkup`` says what they mean."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from msgspec.structs import replace

from atlas_core.assembly.checkup import Facts, HardwareFacts, ModelFacts, StartFacts
from atlas_core.assembly.environment import allow_list, start_folder, trace_sink
from atlas_core.assembly.explain import explain
from atlas_core.assembly.machine import choose_machine, compute_target, kernel_tree
from atlas_core.assembly.model import catalogue
from atlas_core.kernels.library import KernelLibrary, build_command
from atlas_core.loading.cached import cached_model
from atlas_core.loading.fetch import cache_directory, refuse_unknown
from atlas_core.loading.hub import offline
from atlas_core.plugins import PluginRecord, Registry, survey
from atlas_core.plugins.probe import Prober
from atlas_core.plugins.registry import canonical
from atlas_core.runtime.host import memory
from atlas_core.server.listen import bind_socket
from atlas_core.settings import Settings
from atlas_core.vocab.errors import AtlasError
from atlas_core.vocab.target import Target
from atlas_core.vocab.verdict import Verdict


def gather(settings: Settings, mistake: AtlasError | None = None) -> Facts:
    """Look at everything. ``mistake`` is what was wrong with the settings, which then are the defaults.

    Raises UsageError or PluginError for an ATLAS_PLUGINS or ATLAS_TRACE_PLUGINS that is wrong.
    """
    records = survey(allow_list(os.environ), trace_sink(os.environ))
    registry, conflict = _registry(records)
    cache = cache_directory()
    proxies = getproxies_environment()
    return Facts(
        plugins=records,
        conflict=conflict,
        settings=mistake,
        hardware=_hardware(registry, settings.hardware) if registry else (),
        asked=settings.hardware is not None and registry is not None,
        families=sorted(registry.models) if registry else (),
        model=_model(registry, settings) if registry and settings.model else None,
        cache=str(cache),
        cache_error=_write_error(cache),
        cache_free=_free(cache),
        memory_free=memory()[0] or None,
        address=f"{settings.bind} port {settings.port}",
        port_error=_port_error(settings),
        token=_token(),
        offline=offline(),
        proxies=proxy_hosts(proxies),
        no_proxy=proxies.get("no", ""),
        starts=_starts(settings),
    )


def _starts(settings: Settings) -> StartFacts | None:
    folder = start_folder(settings)
    if folder is None:
        return None
    return StartFacts(str(folder), sum(1 for _ in folder.glob("*.start")), _write_error(folder))


def _registry(records: tuple[PluginRecord, ...]) -> tuple[Registry | None, AtlasError | None]:
    try:
        return Registry.of(records), None
    except AtlasError as error:
        return None, error


def _hardware(registry: Registry, wanted: str | None) -> list[HardwareFacts]:
    prober, tree = Prober(), kernel_tree(registry)[0]
    names = sorted(registry.hardware)
    if wanted is not None:
        try:
            registry.hardware.require(wanted)
        except AtlasError as error:
            return [HardwareFacts(wanted, "", Verdict.no(": ".join(filter(None, (error.what, error.why)))))]
        names = [canonical(wanted)]
    found = []
    for name in names:
        if name in tree.hardware and tree.hardware[name].manifest.abstract and wanted is None:
            continue
        dist = registry.hardware.owner(name).dist
        facts = HardwareFacts(name, dist, prober.probe(registry.hardware[name].probe, dist))
        found.append(_machine(registry, facts) if facts.probed.ok else facts)
    return found


def _machine(registry: Registry, facts: HardwareFacts) -> HardwareFacts:
    """``facts`` with kernels and compiler."""
    try:
        machine = choose_machine(registry, facts.name)
        library = KernelLibrary(machine.tree, machine.places, Target(machine.name, machine.arch))
        target = compute_target(registry, machine.chain[0].vendor)
    except AtlasError as error:
        return replace(facts, broken=error)
    compiler: str | AtlasError
    try:
        compiler = target.find_compiler().version.partition(";")[0]  # its flags follow
    except AtlasError as error:
        compiler = error
    return replace(
        facts, arch=machine.arch, modules=len(library.modules()), unusable=library.stale(),
        build=build_command(machine.name, machine.arch), compiler=compiler,
    )  # fmt: skip


def _model(registry: Registry, settings: Settings) -> ModelFacts:
    name = settings.model or ""
    path = cached_model(name, catalogue(registry), settings.revision)
    try:
        if path is None:
            refuse_unknown(name, catalogue(registry))
            return ModelFacts(name, None)
        found = explain(registry, replace(settings, model=str(path), revision=None))
    except AtlasError as error:
        return ModelFacts(name, str(path) if path else None, error=error)
    return ModelFacts(name, str(path), found["target"])


def _nearest(path: Path) -> Path:
    """The folder itself, or the nearest of its parents that exists."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


def _write_error(folder: Path) -> str:
    """Why nothing can be written into ``folder``, or into the parent that it would be made in; empty when it can."""
    try:
        with tempfile.TemporaryFile(dir=_nearest(folder)) as file:
            file.write(b"atlas doctor")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{error.strerror or error} in {_nearest(folder)}"
    return ""


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(_nearest(folder)).free
    except OSError:
        return None


def _port_error(settings: Settings) -> AtlasError | None:
    try:
        bind_socket(settings.bind, settings.port).close()
    except AtlasError as error:
        return error
    return None


def _token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def proxy_hosts(proxies: Mapping[str, str]) -> dict[str, str]:
    """Scheme → host and port of each proxy; user names and passwords, which its URL may carry, are left out."""
    hosts = {}
    for scheme, url in proxies.items():
        if scheme != "no":
            hosts[scheme] = urlsplit(url if "://" in url else f"//{url}").netloc.rpartition("@")[2]
    return hosts
