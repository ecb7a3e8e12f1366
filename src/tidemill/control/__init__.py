"""The control plane: cluster metadata as typed commands, an immutable image and a store behind a protocol.

``store`` (the protocol), ``memory`` and ``sqlite`` (its implementations), ``commands`` (what can be asked),
``planning`` (what is refused, what is written), ``image`` (what was agreed on) and ``controller`` (the door).
"""
