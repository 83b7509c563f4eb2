"""What runs inside `async with scheduler`: nothing here is public."""
