"""What survives? Adapters gathered from their shards, written beside and renamed into place, a few of them kept."""
