"""A program that says from where it has imported aiodelay."""

import aiodelay

if __name__ == "__main__":
    print("from", aiodelay.__file__, flush=True)
