"""Networks on images, as stacks: MLP, VGG-like, ResNet, ViT, Forward-Forward, and torchvision's own."""
