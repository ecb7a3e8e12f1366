"""Kafka's names for settings point to settings and topic configs that exist."""

from __future__ import annotations

from tidemill.config.kafka_names import BROKER_CONFIGS, BROKER_CONFIGS_OF_TOPICS
from tidemill.config.settings import SETTINGS
from tidemill.config.topic_keys import TOPIC_KEYS


def test_every_name_stands_for_something_that_can_be_set() -> None:
    assert {each.setting for each in BROKER_CONFIGS} <= {info.name for info in SETTINGS}
    assert set(BROKER_CONFIGS_OF_TOPICS.values()) <= set(TOPIC_KEYS)
    assert all(TOPIC_KEYS[key].effective for key in BROKER_CONFIGS_OF_TOPICS.values())


def test_no_name_is_given_twice() -> None:
    names = [*(each.name for each in BROKER_CONFIGS), *BROKER_CONFIGS_OF_TOPICS]
    assert len(set(names)) == len(names)
