"""Found before the real one in the processes that tests start, so that they run as a user's install does.

kio imports hypothesis when it is there, which takes half a second; only the tests themselves need it.
"""

raise ImportError("hypothesis is not part of an installation of Tidemill")
