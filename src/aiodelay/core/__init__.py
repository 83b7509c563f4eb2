"""Rules and tables that all stores share: no I/O, no clock, no logging.

Begin with `rules.py`: it decides what every command, settlement and lapse does. `table.py` is the interface through
which the rules read and change a store's messages. `dict_table/` implements this interface with dicts, for the memory
store and for the pending messages of a Kafka partition. `fair_share.py` decides which lane's message is claimed next.
"""

__all__: list[str] = []
