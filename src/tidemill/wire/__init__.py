"""The Kafka protocol as bytes: no I/O, no event loop.

``frames``    the limits of a frame, and cutting a buffer into frames
``apis``      which APIs and versions are served, and their message classes
``extra``     message versions that kio does not have yet
``tables``    the messages of our own APIs, with ``cluster``; both are declared by ``extensions``
``schema``    what a message class says about its bytes
``guard``     the walk over untrusted bytes that makes the native decoder safe
``requests``  headers and bodies from bytes to entities
``encode``    bodies from mappings to bytes, by the writers in ``values``
``hot``       the Produce and Fetch responses, packed by hand
"""

# Before any module of kio: see tidemill.errors.kafka_codes.
import tidemill.errors  # noqa: F401
