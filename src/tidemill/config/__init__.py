"""Settings of a node and configs of topics: values with a type, a default, a range and a purpose.

>>> load_settings({"listen": "127.0.0.1:0"}, {"TIDEMILL_MAX_FRAME_BYTES": "50 MiB"}).max_frame_bytes
52428800
"""

from __future__ import annotations

from tidemill.config.loading import CONFIG_VARIABLE, find_config_file, load_settings
from tidemill.config.schema import SettingInfo
from tidemill.config.settings import SETTINGS, Settings
from tidemill.config.topic import AlterOp, TopicConfig, apply_changes, check_overrides
from tidemill.config.topic_keys import TOPIC_KEYS, ConfigKey, ConfigKind, topic_key
from tidemill.config.values import Address, parse_address

__all__ = (
    "CONFIG_VARIABLE",
    "SETTINGS",
    "TOPIC_KEYS",
    "Address",
    "AlterOp",
    "ConfigKey",
    "ConfigKind",
    "SettingInfo",
    "Settings",
    "TopicConfig",
    "apply_changes",
    "check_overrides",
    "find_config_file",
    "load_settings",
    "parse_address",
    "topic_key",
)
