"""APIs about transactions: producer ids, transactions, jobs that publish."""
