"""Print the path from which aiodelay is imported."""

import aiodelay

if __name__ == "__main__":
    print("from", aiodelay.__file__, flush=True)
