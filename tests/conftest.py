from hypothesis import settings

# A loaded machine is slow, which says nothing about the code. `--hypothesis-profile=nightly` takes its time.
settings.register_profile("ours", deadline=None)
settings.register_profile("nightly", deadline=None, derandomize=False, max_examples=2000)
settings.load_profile("ours")
