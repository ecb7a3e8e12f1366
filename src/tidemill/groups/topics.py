"""Which topics exist, as far as groups need to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from tidemill.control.image import MetadataImage

__all__ = ("ImageTopics", "SubscribedTopic", "Topics")


@dataclass(frozen=True, slots=True)
class SubscribedTopic:
    """A topic that a group consumes. A change of any field calls for a new assignment."""

    id: UUID
    name: str
    partitions: int


class Topics(Protocol):
    """The topics that exist now. Groups look again whenever ``revision`` has changed."""

    @property
    def revision(self) -> int:
        """A number that changes whenever anything else here may have changed."""

    def find(self, name: str) -> SubscribedTopic | None:
        """The topic, if it exists."""

    def name_of(self, topic_id: UUID) -> str | None:
        """The name of the topic with that id, if it exists."""

    def names(self) -> Iterable[str]:
        """The topics that a pattern can match: all but internal ones."""

    @property
    def count(self) -> int:
        """About how many topics there are."""

    @property
    def partition_count(self) -> int:
        """About how many partitions all topics have."""

    def frozen(self) -> Topics:
        """The topics as they are now, unaffected by later changes."""


class ImageTopics:
    """The topics of the newest metadata image, as groups need them."""

    def __init__(self, image: Callable[[], MetadataImage]) -> None:
        self._image = image

    @property
    def revision(self) -> int:
        """The revision of the metadata image."""
        return self._image().revision

    def find(self, name: str) -> SubscribedTopic | None:
        """The topic, if it exists."""
        topic = self._image().topics.get(name)
        return None if topic is None else SubscribedTopic(topic.id, topic.name, len(topic.partitions))

    def name_of(self, topic_id: UUID) -> str | None:
        """The name of the topic with that id, if it exists."""
        return self._image().topic_names_by_id.get(topic_id)

    def names(self) -> Iterable[str]:
        """The names of all topics but the internal ones."""
        return (topic.name for topic in self._image().topics.values() if not topic.internal)

    @property
    def count(self) -> int:
        """The number of topics, internal ones included."""
        return len(self._image().topics)

    @property
    def partition_count(self) -> int:
        """The number of replicas of all topics, internal ones included: at least that of partitions."""
        return sum(self._image().replica_counts.values())

    def frozen(self) -> ImageTopics:
        """The topics of the present image."""
        image = self._image()
        return ImageTopics(lambda: image)
