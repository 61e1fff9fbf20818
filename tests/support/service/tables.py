"""The tables of the service after operations, as an oracle for what its file holds."""

from __future__ import annotations

from dataclasses import replace

from areal_lora.run_folder.paths import DesiredPhase
from areal_lora.service.queue.queue_rows import AdapterRow, Tables


def after(tables: Tables, *rows: AdapterRow) -> Tables:
    """``tables`` once operations have made their adapters ``rows``."""
    for row in rows:
        at, deleted = (row.tenant, row.name), tables.deleted
        adapters = {**tables.adapters, at: row}
        if row.wanted is DesiredPhase.DELETED:
            del adapters[at]
            deleted = {**deleted, row.tenant: max(row.incarnation, deleted.get(row.tenant, 0))}
        tables = replace(tables, adapters=adapters, deleted=deleted)
    return tables
