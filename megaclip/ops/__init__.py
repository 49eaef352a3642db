"""Operations on tiles of the similarity matrix, on one device, without process groups and without autograd."""
