"""The trainer process of a site or a simulation, and the processes that train one model together."""
