"""The plan in full: every process, rank, port, size and file as tables (``--dry-run --details``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table

from areal_lora.config.models import Config
from areal_lora.config.sizing.memory import GIB
from areal_lora.launcher.plan import JobPlan, ProcessSpec


def human_bytes(n: float) -> str:
    """``1500000`` -> ``1.50 MB`` (decimal units, as link and disk sizes are given)."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1000
    return f"{n:.2f} TB"


def details(config: Config, plan: JobPlan) -> Iterator[Table]:
    yield from (_processes(plan), _ranks(config, plan), _ports(plan), _estimates(plan), _what_if(plan), _files(plan))


def make_table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _processes(plan: JobPlan) -> Table:
    table = make_table("Processes", "process", "node", "devices", "threads", "module", right=("node", "threads"))
    for process in plan.processes:
        devices = ",".join(map(str, process.devices)) or "cpu"
        table.add_row(process.name, str(process.node), devices, str(process.cpus), _command(process))
    return table


def _command(process: ProcessSpec) -> str:
    """Return module and arguments without the run folder, which is the same for all processes."""
    _, _, module, _, _, *rest = process.argv
    return " ".join([module, *rest])


def _ranks(config: Config, plan: JobPlan) -> Table:
    t = config.trainer
    title = f"Trainer ranks (tp {t.tp}, pp {t.pp}, ep {t.ep}, etp {t.etp})"
    table = make_table(title, "rank", "tp", "pp", "dp", "ep", "etp", right=("rank", "tp", "pp", "dp", "ep", "etp"))
    for c in plan.ranks:
        table.add_row(*map(str, (c.rank, c.tp, c.pp, c.dp, c.ep, c.etp)))
    return table


def _ports(plan: JobPlan) -> Table:
    table = make_table("Ports", "process", "plane", "bind", "port", right=("port",))
    for port in plan.ports:
        table.add_row(port.process, port.plane, port.host, str(port.port) if port.port else "chosen by the system")
    return table


def _estimates(plan: JobPlan) -> Table:
    e = plan.estimates
    table = make_table("Sizes", "what", "parameters", "tensors", "bytes", right=("parameters", "tensors", "bytes"))
    table.add_row("base model (frozen)", f"{e.base_parameters:,}", "", human_bytes(e.base_bytes))
    for adapter in e.adapters:
        size = adapter.size
        table.add_row(
            f"adapter {adapter.name}: PEFT file",
            f"{size.file_parameters:,}",
            f"{size.names:,}",
            human_bytes(adapter.file_bytes),
        )
        table.add_row(
            f"adapter {adapter.name}: wire, each publish",
            f"{size.parameters:,}",
            f"{size.tensors:,}",
            human_bytes(adapter.wire_bytes),
        )
    table.add_row("adapter versions resident on a server", str(e.resident_versions), "", "")
    return table


def _what_if(plan: JobPlan) -> Table:
    columns = ("rank: device", "rank: host", "server: device", "server: host")
    table = make_table("What if, estimated, in GiB of one device and of the host", "change", *columns, right=columns)
    for one in plan.what_if:
        values = (one.rank_device, one.rank_host, one.server_device, one.server_host)
        table.add_row(one.change, *(f"{value / GIB:.2f}" if value else "" for value in values))
    return table


def _files(plan: JobPlan) -> Table:
    table = make_table("Files", f"in RUN = {plan.run_folder}")
    for name in plan.files:
        table.add_row(name.removeprefix(f"{plan.run_folder}/"))
    return table
