"""What an adapter promises beyond the contract, and the small parts that adapters share."""
