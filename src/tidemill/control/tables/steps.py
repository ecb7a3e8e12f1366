"""Changes of tables that may be too large for one transaction of the store.

They are one transaction if they fit, which is so for tables of some dozens of partitions. Else they are
several, and the last one is the command itself, so that it is done when it has been answered. A caller that
is interrupted in between finds a table with fewer partitions, or with the new configs on some of them, and
can ask again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.control.commands import SetTopicConfigs
from tidemill.control.tables.commands import AlterTable, DropTable, DropTablePartition
from tidemill.control.tables.planning import LOGS_PER_ALTER_MAX, logs_to_alter, partitions_per_drop_max
from tidemill.errors import ErrorCode, TidemillError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemill.control.commands import Command
    from tidemill.control.controller import Controller
    from tidemill.control.image import MetadataImage
    from tidemill.control.tables.images import TableImage

__all__ = ("alter_table", "drop_table")

_STEPS_AT_ONCE = 10
"""Few, because planning a step of a table of 1,000 partitions holds the event loop for a millisecond."""


async def drop_table(controller: Controller, command: DropTable) -> TableImage:
    """Drop a table of any size; gives its last image. Raises what ``Controller.submit`` raises."""
    before = controller.image.tables.get(command.name)
    if before is None or command.table_id not in (None, before.id):
        return await controller.submit(command)
    in_steps = False
    # Repeated, because somebody may be adding partitions meanwhile.
    while drops := _drops_before(controller.image, before.id):
        in_steps = True
        await _submit_all(controller, drops)
    # By its id, because the name may mean another table by now.
    dropped = await controller.submit(DropTable(name=before.name, table_id=before.id))
    return before if in_steps else dropped


async def alter_table(controller: Controller, command: AlterTable) -> TableImage:
    """Alter a table of any size. Raises what ``Controller.submit`` raises."""
    table = controller.image.tables.get(command.name)
    if table is not None and _configs_before(controller.image, command):
        # What does not concern the logs comes first, so that a refusal leaves them alone.
        await controller.submit(msgspec.structs.replace(command, topic_configs=None))
        command = AlterTable(name=table.name, table_id=table.id, topic_configs=command.topic_configs)
        while ahead := _configs_before(controller.image, command):
            await _submit_all(controller, ahead)
    return await controller.submit(command)


def _drops_before(image: MetadataImage, table_id: int) -> list[DropTablePartition]:
    """Drops of partitions after which the rest of the table fits into one transaction."""
    table = image.tables_by_id.get(table_id)
    if table is None:
        return []
    excess = max(0, len(table.partitions) - partitions_per_drop_max(image, table))
    return [
        DropTablePartition(table=table.name, value=partition.value, table_id=table.id)
        for partition in table.partitions[:excess]
        if partition.value is not None
    ]


def _configs_before(image: MetadataImage, command: AlterTable) -> list[SetTopicConfigs]:
    """Changes of logs after which those of the rest fit into one transaction."""
    table = image.tables.get(command.name)
    configs = command.topic_configs
    if table is None or configs is None or command.table_id not in (None, table.id):
        return []
    excess = logs_to_alter(image, table, configs)[LOGS_PER_ALTER_MAX:]
    return [SetTopicConfigs(name=log.name, configs=configs) for log in excess]


async def _submit_all(controller: Controller, commands: Sequence[Command[Any]]) -> None:
    """Submit steps, a few at a time. A step may fail because its partition is gone: it is not needed."""
    for start in range(0, len(commands), _STEPS_AT_ONCE):
        for result in await controller.submit_many(commands[start : start + _STEPS_AT_ONCE]):
            if isinstance(result, TidemillError) and result.code is not ErrorCode.unknown_topic_or_partition:
                raise result
