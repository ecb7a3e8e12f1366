"""Networking: how one process sends requests to another. Below the server, so that nodes can talk to nodes.

| module | idea |
| --- | --- |
| ``connection`` | one connection to one node: versions, pipelined requests, deadlines |
| ``transport`` | how an address is listened at and connected to: TCP, or what a simulation brings |
| ``frame_receiver`` | frames from a socket, received where they are decoded |
| ``pool`` | open connections by address and purpose |
| ``retry`` | which errors pass by themselves, how long to wait, when to give up |
| ``answers`` | the error of an answer as an exception |
| ``errors`` | what the operating system says, in words for people |

What a client knows of a cluster (who leads what, where a coordinator is) is ``client/cluster.py``.
"""
