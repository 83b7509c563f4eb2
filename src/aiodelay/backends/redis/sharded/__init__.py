"""A namespace of several shards: one store over the `RedisStore` of each shard. Begin with `store`."""

__all__: list[str] = []
