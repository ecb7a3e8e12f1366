"""Settings of a node and configs of topics: values with a type, a default, a range and a purpose.

``values``      addresses, sizes and times as people write them
``schema``      what a setting says about itself
``settings``    the settings of a node
``loading``     settings from files, the environment and the command line
``topic_keys``  the configs of topics
``topic``       configs of a topic, checked and changed

>>> from tidemill.config.loading import load_settings
>>> load_settings({"listen": "127.0.0.1:0"}, {"TIDEMILL_MAX_FRAME_BYTES": "50 MiB"}).max_frame_bytes
52428800
"""
