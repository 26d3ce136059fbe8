"""examples/retinanet: what it reads, what it refuses, and who sees which image when."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from annotations import AnnotatedImage, DataError, ImageFolder
from dataset import DetectionSet, StepPlan, TrainingBatches, evaluation_batches, read_annotations
from image_cache import CacheError, ImageCache
from options import read_options
from PIL import Image
from shapes import make_set


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shapes")
    make_set(out, train=12, val=3, image_size=48, seed=3)
    return out


def read(folder: Path, file: str, bad_data: str = "refuse", **more):
    names = None if file.endswith(".json") else folder / "classes.csv"
    values = {"classes": None, "limit": None, **more}
    return read_annotations(folder / file, ImageFolder(folder), names, bad_data=bad_data, **values)


def test_the_set_is_the_same_for_the_same_seed(shapes: Path, tmp_path: Path) -> None:
    make_set(tmp_path, train=12, val=3, image_size=48, seed=3)
    for file in (*shapes.glob("*.csv"), *shapes.glob("*.json"), *shapes.rglob("*.jpg")):
        assert (tmp_path / file.relative_to(shapes)).read_bytes() == file.read_bytes(), file.name


def test_both_formats_say_the_same(shapes: Path) -> None:
    from_csv, from_coco = (read(shapes, f"train.{suffix}")[0] for suffix in ("csv", "json"))
    assert from_csv.classes == from_coco.classes == ("circle", "square", "triangle")
    assert [one.path for one in from_csv.images] == [one.path for one in from_coco.images]
    for one, other in zip(from_csv.images, from_coco.images, strict=True):
        assert [box.label for box in one.boxes] == [box.label for box in other.boxes]
        for a, b in zip(one.boxes, other.boxes, strict=True):
            assert a.corners == pytest.approx(b.corners, abs=1e-3)


def test_images_are_found_by_their_id_below_links_and_not_guessed_at(shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(shapes / "train")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert ImageFolder(tmp_path).find("train-00003") == tmp_path / "linked" / "train-00003.jpg"
    (tmp_path / "other").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "other" / "train-00003.png")
    assert "may be" in str(ImageFolder(tmp_path).find("train-00003"))
    assert ImageFolder(tmp_path).find("other/train-00003.png") == tmp_path / "other" / "train-00003.png"


def test_a_limit_takes_the_first_images(shapes: Path) -> None:
    limited = read(shapes, "train.csv", limit=5)[0].images
    assert limited == read(shapes, "train.csv")[0].images[:5]


def rows_of(folder: Path) -> list[list[str]]:
    with (folder / "train.csv").open(newline="") as file:
        return list(csv.reader(file))


def broken(shapes: Path, tmp_path: Path, change) -> Path:
    """A copy of the set whose third row of boxes (line 4) is changed."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "classes.csv").symlink_to(shapes / "classes.csv")
    shutil.copytree(shapes / "train", folder / "train")
    rows = rows_of(shapes)
    change(rows[3])
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


def set_field(index: int, value: str):
    return lambda row: row.__setitem__(index, value)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (set_field(0, "nowhere"), "missing images", "there is no image 'nowhere' in"),
        (set_field(5, "1.4"), "boxes outside of their image", "outside of its image"),
        (set_field(4, "nan"), "boxes outside of their image", "nan"),
        (set_field(2, "/m/zebra"), "boxes of unknown classes", "'/m/zebra'"),
        (set_field(4, "wide"), "boxes without four numbers", "XMin 'wide'"),
        (lambda row: row.__delitem__(slice(3, None)), "boxes without four numbers", "XMin None"),
        (lambda row: row.__setitem__(5, row[4]), "boxes without an area", "no area"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_or_counted(shapes: Path, tmp_path: Path, change, kind, said) -> None:
    folder = broken(shapes, tmp_path, change)
    with pytest.raises(DataError) as refused:
        read(folder, "train.csv")
    assert f"{folder / 'train.csv'}:4: " in str(refused.value) and said in str(refused.value)
    assert "--bad-data skip" in str(refused.value)
    kept, problems = read(folder, "train.csv", "skip")
    assert problems.kinds == {kind: 1}
    assert sum(len(image.boxes) for image in kept.images) == len(rows_of(shapes)) - 2


def test_many_problems_are_counted_and_the_first_are_shown(shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("ImageID,LabelName,XMin,XMax,YMin,YMax\n" + "train-00000,/m/x,0,1,0,1\n" * 30)
    (tmp_path / "classes.csv").symlink_to(shapes / "classes.csv")
    shutil.copytree(shapes / "train", tmp_path / "train")
    with pytest.raises(DataError, match="boxes of unknown classes: 30") as refused:
        read(tmp_path, "train.csv")
    assert str(refused.value).count("/m/x") == 10 and "… 20 more" in str(refused.value)
    with pytest.raises(DataError, match=r"(?s)no image that can be used.*boxes of unknown classes: 30"):
        read(tmp_path, "train.csv", "skip")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", r"train\.csv:1: is empty"),
        ("ImageID,LabelName,XMin,XMax,YMin,YMax\n", "has no rows"),
        ("ImageID,LabelName,XMin,XMax\n", r"train\.csv:1: has no column YMin, YMax"),
    ],
)
@pytest.mark.parametrize("bad_data", ["refuse", "skip"])
def test_an_empty_csv_is_an_error_in_any_case(
    shapes: Path, tmp_path: Path, content: str, said: str, bad_data: str
) -> None:
    (tmp_path / "train.csv").write_text(content)
    (tmp_path / "classes.csv").symlink_to(shapes / "classes.csv")
    with pytest.raises(DataError, match=said):
        read(tmp_path, "train.csv", bad_data)


@pytest.mark.parametrize(
    ("part", "change", "kind"),
    [
        ("images", {"file_name": "train/gone.jpg"}, "missing images"),
        ("images", {"width": 0}, "images without a size or a name"),
        ("annotations", {"bbox": [30, 0, 30, 10]}, "boxes outside of their image"),
        ("annotations", {"bbox": [1, 2, 3]}, "boxes without four numbers"),
        ("annotations", {"category_id": 9}, "boxes of unknown classes"),
        ("annotations", {"image_id": 99}, "boxes of unknown images"),
        ("annotations", {"bbox": [1, 2, 0, 5]}, "boxes without an area"),
    ],
)
def test_a_bad_item_of_a_coco_file_is_named_with_its_line(
    shapes: Path, tmp_path: Path, part: str, change: dict, kind: str
) -> None:
    content = json.loads((shapes / "train.json").read_text())
    content[part][2] |= change
    parts = (f'"{name}": [\n' + ",\n".join(map(json.dumps, items)) + "]" for name, items in content.items())
    (tmp_path / "train.json").write_text("{" + ",\n".join(parts) + "}")
    shutil.copytree(shapes / "train", tmp_path / "train")
    lines = (tmp_path / "train.json").read_text().splitlines()
    line = 1 + lines.index(next(one for one in lines if json.dumps(content[part][2]) in one))
    with pytest.raises(DataError) as refused:
        read(tmp_path, "train.json")
    assert f"train.json:{line} ({part}[2]): " in str(refused.value)
    assert read(tmp_path, "train.json", "skip")[1].kinds[kind] == 1


def test_a_crowd_is_no_object_to_learn_and_nothing_to_find_is_an_example(shapes: Path, tmp_path: Path) -> None:
    content = json.loads((shapes / "train.json").read_text())
    first, second = content["images"][:2]
    content["annotations"] = [
        {"id": 1, "image_id": first["id"], "category_id": 1, "bbox": [0, 0, 9, 9], "iscrowd": 1},
        {"id": 2, "image_id": first["id"], "category_id": 2, "bbox": [9, 9, 9, 9], "iscrowd": 0},
    ]
    content["images"] = [first, second]
    (tmp_path / "train.json").write_text(json.dumps(content))
    shutil.copytree(shapes / "train", tmp_path / "train")
    images = read(tmp_path, "train.json")[0].images
    trained, evaluated = (dataset(images, tmp_path, augment=augment) for augment in (True, False))
    assert trained[0, 0][1]["labels"].tolist() == [2] and evaluated[0, 0][1]["iscrowd"].tolist() == [1, 0]
    assert trained[0, 1][1]["boxes"].shape == (0, 4)


def dataset(images: tuple[AnnotatedImage, ...], tmp_path: Path, *, augment: bool, seed: int = 0) -> DetectionSet:
    cache = ImageCache(tmp_path / "cache", 32)
    assert not cache.add_share([(image.path, image.size) for image in images], 0, 1, threads=2)
    return DetectionSet(images, cache, augment=augment, seed=seed)


def test_what_is_random_depends_on_seed_epoch_and_image_alone(shapes: Path, tmp_path: Path) -> None:
    images = read(shapes, "train.csv")[0].images
    data = dataset(images, tmp_path, augment=True)
    forwards = [data[1, index] for index in range(6)]
    torch.manual_seed(99)
    torch.rand(7)
    for index in reversed(range(6)):
        pixels, target = data[1, index]
        assert torch.equal(pixels, forwards[index][0]) and torch.equal(target["boxes"], forwards[index][1]["boxes"])
    assert any(not torch.equal(data[2, index][0], forwards[index][0]) for index in range(6)), "epochs differ"
    other = dataset(images, tmp_path, augment=True, seed=1)
    assert any(not torch.equal(other[1, index][0], forwards[index][0]) for index in range(6)), "seeds differ"


def test_boxes_follow_their_image_when_it_is_mirrored(shapes: Path, tmp_path: Path) -> None:
    images = read(shapes, "train.csv")[0].images
    plain, augmented = (dataset(images, tmp_path, augment=augment) for augment in (False, True))
    seen = set()
    for index in range(len(images)):
        before, after = plain[0, index], augmented[0, index]
        width = before[0].shape[2]
        x1, y1, x2, y2 = before[1]["boxes"].unbind(1)
        mirrored = torch.stack([width - x2, y1, width - x1, y2], 1)
        is_mirrored = torch.allclose(after[1]["boxes"], mirrored, atol=1e-3)
        assert is_mirrored or torch.allclose(after[1]["boxes"], before[1]["boxes"], atol=1e-3)
        seen.add(is_mirrored)
    assert seen == {True, False}


def test_images_are_resized_once_and_again_when_they_change(shapes: Path, tmp_path: Path) -> None:
    source = tmp_path / "wide.png"
    Image.new("RGB", (300, 100), "red").save(source)
    cache = ImageCache(tmp_path / "cache", 60)
    assert cache.add(source) is None
    first = cache.path(source)
    assert Image.open(first).size == (100, 33), "at most 5/3 of the size, whatever the shape"
    written = first.stat().st_mtime_ns
    assert cache.add(source) is None and first.stat().st_mtime_ns == written
    Image.new("RGB", (90, 120), "blue").save(source)
    assert cache.add(source) is None and cache.path(source) != first
    assert Image.open(cache.path(source)).size == (60, 80)
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_image_that_cannot_be_read_is_named_by_the_rank_that_tried(shapes: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jpg", tmp_path / "bad.jpg"
    Image.new("RGB", (50, 50)).save(good)
    bad.write_bytes(good.read_bytes()[:300])
    cache = ImageCache(tmp_path / "cache", 20)
    images = [(good, (50, 50)), (bad, None), (good, None), (good, (100, 50))]
    wrong = cache.add_share(images, 1, 2, threads=2)
    assert list(wrong) == [1, 3] and "cannot be read" in wrong[1]
    assert wrong[3] == "has 50 × 50 pixels; by its annotations it has 100 × 50 pixels"
    assert cache.add_share(images, 0, 2, threads=2) == {}


def test_the_size_that_a_coco_file_gives_is_compared(shapes: Path) -> None:
    assert {image.size for image in read(shapes, "train.json")[0].images} == {(48, 48)}


@pytest.mark.parametrize("name", ["train.csv", "classes.csv", "train.json"])
def test_a_file_in_another_encoding_is_named(shapes: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(shapes, tmp_path / "set")
    file = tmp_path / "set" / name
    file.write_bytes(
        file.read_text().replace("circle", "ci\xe9rcle").replace("train-00001", "tr\xe9").encode("latin-1")
    )
    with pytest.raises(DataError, match=rf"{name}.*UTF-8"):
        read(tmp_path / "set", "train.json" if name == "train.json" else "train.csv")


def test_a_cache_that_cannot_be_written_is_named(shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"file/cache.*cannot be written.*--cache-dir"):
        ImageCache(tmp_path / "file" / "cache", 20).add(next((shapes / "train").iterdir()))


@pytest.mark.parametrize(("world_size", "batch_size", "accumulation"), [(1, 8, 1), (2, 4, 1), (2, 2, 2), (4, 1, 2)])
def test_a_step_sees_the_same_images_however_it_is_divided(world_size: int, batch_size: int, accumulation: int) -> None:
    whole = StepPlan(50, 8, 1, 1, seed=5)
    divided = StepPlan(50, batch_size, accumulation, world_size, seed=5)
    assert (divided.steps, divided.effective_batch) == (6, 8)
    for epoch in (0, 1):
        expected = [set(batch) for batch in whole.batches(0, epoch, 0)]
        ranks = [list(divided.batches(rank, epoch, 0)) for rank in range(world_size)]
        for step in range(6):
            parts = [batch for rank in ranks for batch in rank[step * accumulation : (step + 1) * accumulation]]
            assert set().union(*parts) == expected[step] and sum(map(len, parts)) == 8
    assert list(whole.batches(0, 0, 0)) != list(whole.batches(0, 1, 0)), "each epoch has another order"


def test_a_resumed_run_reads_what_was_left(shapes: Path) -> None:
    plan = StepPlan(20, 2, 2, 1, seed=0)
    whole = list(TrainingBatches(plan, 0, epochs=3))
    for step in (0, 1, 5, 7, 15):
        rest = TrainingBatches(plan, 0, epochs=3)
        rest.first_step = step
        assert list(rest) == whole[2 * step :] and len(rest) == len(whole) - 2 * step


def test_every_image_is_evaluated_once_on_any_number_of_ranks() -> None:
    for ranks in (1, 2, 3, 7):
        found = Counter(
            key for rank in range(ranks) for batch in evaluation_batches(5, 2, rank, ranks) for key in batch
        )
        assert found == Counter({(0, index): 1 for index in range(5)})


def test_files_that_are_not_named_are_found_and_what_has_no_effect_is_refused(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_options(["--local-image-dir", str(shapes)])
    assert (found.annotations, found.class_names) == (shapes / "train.csv", shapes / "classes.csv")
    for words, said in (
        (["--learning-rate", "nan"], "nan is no learning rate"),
        (["--annotations", str(shapes / "train.json")], "not of the same format"),
        (["--batch-size", "0"], "0 is less than 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            read_options(["--local-image-dir", str(shapes), *words])
        assert ended.value.code == 2 and said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        read_options(["--local-image-dir", str(tmp_path)])
    assert "name the file with --annotations" in capsys.readouterr().err
