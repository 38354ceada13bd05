"""What the tests share and is not a test: cases of contracts, models, oracles, engines, a browser."""
