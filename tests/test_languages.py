"""Which language an answer is in, by its letters and its small words."""

import pytest

from rzoo.evals.languages import LANGUAGES, SMALL_WORDS, language_of

WRITTEN = {
    "ar": "القهوة مشروب لذيذ يشربه الناس في الصباح مع الحليب أو السكر، لكن هذا لا يعني أن الشاي أقل منها.",
    "bg": "Кафето е напитка, която хората пият сутрин, за да се събудят. То може да бъде с мляко или без захар.",
    "bn": "সকালে আমি এক কাপ চা খাই এবং তারপর কাজে যাই।",
    "de": "Am Morgen trinke ich eine Tasse Kaffee, und dann gehe ich mit dem Hund in den Park. Das ist nicht schwer.",
    "en": "In the morning I drink a cup of coffee and then I walk to the park with my dog.",
    "es": "Por la mañana bebo una taza de café y luego voy al parque con el perro, que es muy grande.",
    "fa": "صبح‌ها یک فنجان قهوه می نوشم و سپس با سگ خود به پارک می روم. این کار برای من خوب است.",
    "fi": "Aamulla juon kupin kahvia ja sitten menen puistoon koiran kanssa, mutta se ei ole aina helppoa.",
    "fr": "Le matin je bois une tasse de café, puis je vais au parc avec le chien, qui est très grand.",
    "gu": "સવારે હું એક કપ ચા પીઉં છું અને પછી કામ પર જાઉં છું.",
    "he": "בבוקר אני שותה כוס קפה ואחר כך הולך לפארק עם הכלב.",
    "hi": "सुबह मैं एक कप चाय पीता हूँ और फिर काम पर जाता हूँ। यह मेरे लिए अच्छा है।",
    "it": "La mattina bevo una tazza di caffè e poi vado al parco con il cane, che è molto grande.",
    "ja": "朝にコーヒーを一杯飲んでから、犬と公園へ行きます。",
    "kn": "ಬೆಳಿಗ್ಗೆ ನಾನು ಒಂದು ಕಪ್ ಚಹಾ ಕುಡಿಯುತ್ತೇನೆ ಮತ್ತು ನಂತರ ಕೆಲಸಕ್ಕೆ ಹೋಗುತ್ತೇನೆ.",
    "ko": "아침에 나는 커피 한 잔을 마시고 개와 함께 공원에 갑니다.",
    "ml": "രാവിലെ ഞാൻ ഒരു കപ്പ് ചായ കുടിക്കുന്നു.",
    "mr": "सकाळी मी एक कप चहा पितो आणि नंतर कामावर जातो. हे माझ्यासाठी चांगले आहे.",
    "ne": "बिहान म एक कप चिया पिउँछु र त्यसपछि काममा जान्छु। यो मेरो लागि राम्रो छ।",
    "pa": "ਸਵੇਰੇ ਮੈਂ ਇੱਕ ਕੱਪ ਚਾਹ ਪੀਂਦਾ ਹਾਂ ਅਤੇ ਫਿਰ ਕੰਮ ਤੇ ਜਾਂਦਾ ਹਾਂ।",
    "pt": "De manhã bebo uma xícara de café e depois vou ao parque com o cachorro, que não é muito grande.",
    "ru": "Утром я пью чашку кофе, а потом иду в парк с собакой, и это не так трудно, как мы думали.",
    "sw": "Asubuhi ninakunywa kikombe cha kahawa na kisha ninaenda kwa bustani, kwa sababu hii ni nzuri.",
    "ta": "காலையில் நான் ஒரு கப் தேநீர் குடிக்கிறேன்.",
    "te": "ఉదయం నేను ఒక కప్పు టీ తాగుతాను.",
    "th": "ตอนเช้าฉันดื่มกาแฟหนึ่งแก้วแล้วไปสวนสาธารณะ",
    "uk": "Вранці я п'ю чашку кави, а потім йду до парку, і це не так важко, що б ми не думали.",
    "ur": "صبح میں ایک کپ چائے پیتا ہوں اور پھر کام پر جاتا ہوں۔ یہ میرے لیے اچھا ہے۔",
    "vi": "Buổi sáng tôi uống một tách cà phê và sau đó đi bộ trong công viên với con chó của tôi.",
    "zh": "早上我喝一杯咖啡，然后去公园散步。",
}


@pytest.mark.parametrize("language", WRITTEN)
def test_a_text_is_in_the_language_it_is_written_in(language):
    assert language_of(WRITTEN[language]) == language
    assert language_of(WRITTEN[language].upper()) == language


def test_single_words_of_another_script_change_nothing():
    assert language_of("Python और JAX के बारे में यह एक लेख है।") == "hi"


def test_text_without_letters_is_in_no_language_and_a_strange_script_in_none_that_is_known():
    assert language_of("1, 2, 3 …") is language_of("") is None
    assert language_of("Առավոտյան") == "und"


def test_every_small_word_belongs_to_a_language_that_can_be_found():
    assert SMALL_WORDS.keys() <= LANGUAGES
