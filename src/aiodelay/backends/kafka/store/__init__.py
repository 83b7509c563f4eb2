"""The Kafka store. Read `store` first, then `partition`: one owned partition and its pending index."""

__all__: list[str] = []
